"""DeepSeek-V2 and V3: latent attention, and in most layers experts beside shared ones."""

from __future__ import annotations

from penstock.models.config import MAX_LAYERS, Config
from penstock.models.families.parts import activation, gated_mlp, latent_attention, model, num_layers, rms_norm
from penstock.models.names import LATENT
from penstock.models.spec import Block, ModelSpec, family

GPU = "kernels for latent attention, which do not exist yet: use a model with attention over keys and values"
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
EXPERTS = dict(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=32)
DENSE = dict(first_k_dense_replace=2)


def deepseek(c: Config, interleaved: bool, num_dense: int) -> ModelSpec:
    mixer = latent_attention(c, ranks=(1536, 512), sizes=(128, 64), value_size=128, interleaved=interleaved)
    first = c.count("first_k_dense_replace", default=num_dense, least=0, most=MAX_LAYERS)
    if first < num_layers(c):
        c.refuse("first_k_dense_replace", "is not supported: experts beside shared ones do not exist yet")
    c.ignore(*EXPERTS, "n_group", "topk_group", "topk_method", "norm_topk_prob", "routed_scaling_factor")
    block = Block(mixer, gated_mlp(c, activation(c, default="silu")), rms_norm(c), rms_norm(c))
    return model(c, layers=[block] * num_layers(c), norm=rms_norm(c), names=LATENT, tied=False)


@family("DeepseekV2ForCausalLM", like=[TINY | DENSE | dict(rope_parameters=YARN)], cpu_only=GPU)
def deepseek_v2(c: Config) -> ModelSpec:
    c.only("mlp_bias", False)
    return deepseek(c, True, 0)


@family("DeepseekV3ForCausalLM", like=[TINY | DENSE | dict(q_lora_rank=24, rope_parameters=YARN)], cpu_only=GPU)
def deepseek_v3(c: Config) -> ModelSpec:
    c.ignore("num_nextn_predict_layers")
    return deepseek(c, c.flag("rope_interleave", True), 3)
