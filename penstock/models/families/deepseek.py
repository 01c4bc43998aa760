"""DeepSeek-V2 and V3: latent attention, and in most layers experts beside shared ones."""

from __future__ import annotations

from penstock.models.config import MAX_HIDDEN, MAX_LAYERS, Config
from penstock.models.experts import Experts
from penstock.models.families.parts import (
    MAX_EXPERTS,
    activation,
    experts,
    gated_mlp,
    latent_attention,
    model,
    num_layers,
    rms_norm,
)
from penstock.models.latent import LatentAttentionSpec
from penstock.models.layer import Ffn
from penstock.models.names import EXPERTS, LATENT, Names
from penstock.models.spec import Block, ModelSpec, family

METHODS = {"greedy": False, "group_limited_greedy": True}
TRAINING = ("aux_loss_alpha", "seq_aux", "ep_size")
EXPERT_KEYS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "output_router_logits",
    "router_aux_loss_coef",
    "topk_method",
)
TINY = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    max_position_embeddings=128,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=32,
    beta_slow=1,
    mscale=0.8,
    mscale_all_dim=0.6,
)
MIXED = TINY | dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, num_hidden_layers=3)


def deepseek(c: Config, mixer: LatentAttentionSpec, num_dense: int, mixture: Experts | None) -> ModelSpec:
    """Build a model whose first `num_dense` layers have no experts."""
    c.ignore(*EXPERT_KEYS, *TRAINING)
    c.only("moe_layer_freq", 1)
    dense, norm = gated_mlp(c, activation(c, default="silu")), rms_norm(c)
    feeds: list[Ffn] = [dense if mixture is None or i < num_dense else mixture for i in range(num_layers(c))]
    layers = [Block(mixer, feed, norm, norm) for feed in feeds]
    return model(c, layers=layers, norm=norm, names=LATENT | EXPERTS | drafting_layers(c), tied=False)


def drafting_layers(c: Config) -> Names:
    """Ignore the layers beyond those counted, which draft (`penstock.draft.net.mtp`)."""
    drafting = c.count("num_nextn_predict_layers", "num_mtp_layers", default=1, least=0, most=MAX_LAYERS)
    return Names(ignored=tuple(f"layers.{num_layers(c) + i}." for i in range(drafting)))


def count_dense(c: Config, default: int) -> int:
    return c.count("first_k_dense_replace", default=default, least=0, most=MAX_LAYERS)


def shared_width(c: Config, wide: int, count: int) -> int:
    """Return the width of the MLP that stands for all shared experts; `wide` and `count` are the family's defaults."""
    wide = c.count("moe_intermediate_size", default=wide, most=MAX_HIDDEN)
    is_none = "n_shared_experts" in c.values and c.values["n_shared_experts"] is None
    return 0 if is_none else wide * c.count("n_shared_experts", default=count, least=0, most=MAX_EXPERTS)


@family(
    "DeepseekV2ForCausalLM",
    like=[
        MIXED | dict(rope_parameters=YARN, first_k_dense_replace=1),
        MIXED
        | dict(q_lora_rank=24, topk_method="group_limited_greedy", n_group=4, topk_group=2, num_hidden_layers=2)
        | dict(routed_scaling_factor=2.0, attention_bias=True, n_shared_experts=1),
        TINY | dict(first_k_dense_replace=2),
    ],
)
def deepseek_v2(c: Config) -> ModelSpec:
    c.only("mlp_bias", False)
    c.only("scoring_func", "softmax")
    c.only("norm_topk_prob", False)
    first = count_dense(c, 0)
    mixture = softmax_experts(c) if first < num_layers(c) else None
    mixer = latent_attention(c, ranks=(1536, 512), sizes=(128, 64), value_size=128, interleaved=True)
    return deepseek(c, mixer, first, mixture)


def softmax_experts(c: Config) -> Experts:
    is_grouped = c.choice("topk_method", choices=METHODS, default="greedy")
    return experts(
        c,
        "moe_intermediate_size",
        count=64,
        chosen=6,
        shared=shared_width(c, 1407, 2),
        scale=c.number("routed_scaling_factor", default=1.0),
        num_groups=c.count("n_group", default=1, most=MAX_EXPERTS) if is_grouped else 1,
        top_groups=c.count("topk_group", default=1, most=MAX_EXPERTS) if is_grouped else 1,
    )


@family(
    "DeepseekV3ForCausalLM",
    like=[
        MIXED | dict(q_lora_rank=24, rope_parameters=YARN, n_group=4, topk_group=2, first_k_dense_replace=1),
        MIXED
        | dict(rope_interleave=False, n_group=1, topk_group=1, norm_topk_prob=False, first_k_dense_replace=0)
        | dict(num_hidden_layers=2, routed_scaling_factor=1.0),
    ],
)
def deepseek_v3(c: Config) -> ModelSpec:
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    mixer = latent_attention(
        c, ranks=(1536, 512), sizes=(128, 64), value_size=128, interleaved=c.flag("rope_interleave", True)
    )
    first = count_dense(c, 3)
    mixture = sigmoid_experts(c, count=256, wide=2048, groups=(8, 4), scale=2.5) if first < num_layers(c) else None
    return deepseek(c, mixer, first, mixture)


def sigmoid_experts(c: Config, *, count: int, wide: int, groups: tuple[int, int], scale: float) -> Experts:
    """Read experts chosen by sigmoid scores and a bias, with the family's defaults."""
    return experts(
        c,
        "moe_intermediate_size",
        count=count,
        chosen=8,
        shared=shared_width(c, wide, 1),
        score="sigmoid",
        normalizes=c.flag("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", default=scale),
        num_groups=c.count("n_group", default=groups[0], most=MAX_EXPERTS),
        top_groups=c.count("topk_group", default=groups[1], most=MAX_EXPERTS),
        best_of_group=2,
        selection_bias=True,
    )
