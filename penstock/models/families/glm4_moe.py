"""GLM-4.5 and later: sigmoid routing with a bias for the choice, shared experts, dense layers first."""

from __future__ import annotations

from penstock.models.config import MAX_HIDDEN, MAX_LAYERS, Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import (
    MAX_EXPERTS,
    activation,
    attention,
    experts,
    gated_mlp,
    head_size,
    model,
    num_layers,
    rms_norm,
)
from penstock.models.names import EXPERTS, LLAMA, QK_NORM, Names
from penstock.models.spec import Block, ModelSpec, family

MOE = TINY | dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, head_dim=16)


@family(
    "Glm4MoeForCausalLM",
    like=[
        MOE | dict(use_qk_norm=True, routed_scaling_factor=2.5, num_hidden_layers=3),
        MOE
        | dict(n_group=4, topk_group=2, norm_topk_prob=False, first_k_dense_replace=0, n_shared_experts=2)
        | dict(attention_bias=True, partial_rotary_factor=0.25),
    ],
)
def glm4_moe(c: Config) -> ModelSpec:
    drafting = c.count("num_nextn_predict_layers", "num_mtp_layers", default=1, least=0, most=MAX_LAYERS)
    size, bias = head_size(c), c.flag("attention_bias", False)
    norm = rms_norm(c, size, eps=1e-5) if c.flag("use_qk_norm", False) else None
    turn = rope(c, size, fraction=0.5)
    mixer = attention(c, rope=turn, size=size, qkv_bias=bias, q_norm=norm, k_norm=norm)
    wide = c.count("moe_intermediate_size", default=1408, most=MAX_HIDDEN)
    mixture = experts(
        c,
        "moe_intermediate_size",
        count=128,
        chosen=8,
        shared=wide * c.count("n_shared_experts", default=1, least=0, most=MAX_EXPERTS),
        score="sigmoid",
        normalizes=c.flag("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", default=1.0),
        num_groups=c.count("n_group", default=1, most=MAX_EXPERTS),
        top_groups=c.count("topk_group", default=1, most=MAX_EXPERTS),
        best_of_group=2,
        selection_bias=True,
    )
    dense = c.count("first_k_dense_replace", default=1, least=0, most=MAX_LAYERS)
    feed, outer = gated_mlp(c, activation(c, default="silu")), rms_norm(c, eps=1e-5)
    layers = [
        Block(mixer, feed if i < dense else mixture, mixer_norm=outer, ffn_norm=outer) for i in range(num_layers(c))
    ]
    ignored = tuple(f"layers.{num_layers(c) + i}." for i in range(drafting))
    names = LLAMA | QK_NORM | EXPERTS | Names(ignored=ignored)
    return model(c, layers=layers, norm=outer, names=names, tied=False)
