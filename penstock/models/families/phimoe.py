"""PhiMoE: layer norms, biases, and experts that are chosen one after the other by a sparse mixer."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.mixtral import MIXTRAL
from penstock.models.families.parts import attention, experts, head_size, layer_norm, model, num_layers, window
from penstock.models.names import EXPERTS, LLAMA, Names, Stored
from penstock.models.spec import Block, ModelSpec, family

LONG = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0] * 8,
    long_factor=[2.0] * 8,
    short_mscale=1.1,
    long_mscale=1.3,
    original_max_position_embeddings=128,
)
PHIMOE = Names(model={"lm_head.bias": Stored("head", kind="bias")}, layer={"mlp.router": "mlp.router"})


@family(
    "PhimoeForCausalLM",
    like=[
        TINY | dict(num_local_experts=6, attention_bias=True, lm_head_bias=True, rope_parameters=LONG),
        TINY | dict(num_local_experts=4, sliding_window=20, router_jitter_noise=0.2),
    ],
)
def phimoe(c: Config) -> ModelSpec:
    c.ignore("input_jitter_noise")
    bias = c.flag("attention_bias", False)
    jitter = c.number("router_jitter_noise", default=0.01, most=1.0)
    norm = layer_norm(c, "rms_norm_eps")
    block = Block(
        attention(c, rope=rope(c, head_size(c), theta=1e6), window=window(c), qkv_bias=bias, out_bias=bias),
        experts(c, count=16, score="sparsemixer", jitter=jitter),
        mixer_norm=norm,
        ffn_norm=norm,
    )
    names = LLAMA | MIXTRAL | PHIMOE | EXPERTS
    spec = model(c, layers=[block] * num_layers(c), norm=norm, names=names, tied=False)
    assert spec.head is not None
    return replace(spec, head=replace(spec.head, bias=c.flag("lm_head_bias", False)))
