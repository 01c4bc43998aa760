"""GLM-4.7-Flash: DeepSeek-V3's attention and experts in other sizes."""

from __future__ import annotations

from penstock.models.config import Config
from penstock.models.families.deepseek import EXPERT_KEYS, MIXED, TINY, drafting_layers, sigmoid_experts
from penstock.models.families.parts import activation, gated_mlp, latent_attention, model, num_layers, rms_norm
from penstock.models.names import EXPERTS, LATENT
from penstock.models.spec import Block, ModelSpec, family


@family(
    "Glm4MoeLiteForCausalLM",
    like=[MIXED | dict(q_lora_rank=24), TINY | dict(rope_interleave=False, mlp_layer_types=["dense", "dense"])],
)
def glm4_moe_lite(c: Config) -> ModelSpec:
    c.only("topk_method", "noaux_tc")
    c.only("scoring_func", "sigmoid")
    mixer = latent_attention(
        c, ranks=(768, 512), sizes=(192, 64), value_size=256, interleaved=c.flag("rope_interleave", True)
    )
    count, norm = num_layers(c), rms_norm(c, eps=1e-5)
    kinds = c.choices("mlp_layer_types", ("dense", "sparse"), count) or ["dense"] + ["sparse"] * (count - 1)
    if c.values.get("first_k_dense_replace") is not None:
        c.only("first_k_dense_replace", kinds.count("dense"))
    dense = gated_mlp(c, activation(c, default="silu"))
    mixture = sigmoid_experts(c, count=64, wide=1536, groups=(1, 1), scale=1.8) if "sparse" in kinds else dense
    c.ignore(*EXPERT_KEYS)
    layers = [Block(mixer, mixture if kind == "sparse" else dense, norm, norm) for kind in kinds]
    return model(c, layers=layers, norm=norm, names=LATENT | EXPERTS | drafting_layers(c), tied=False)
