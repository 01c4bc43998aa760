"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and clamped gates."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import attention, experts, head_size, model, num_layers, rms_norm, window, windows
from penstock.models.layer import SinkAttention
from penstock.models.names import EXPERTS, LLAMA, Names, Stored
from penstock.models.spec import Block, ModelSpec, family

GPT_OSS = Names(
    layer={
        "self_attn.sinks": "attention.sinks",
        "mlp.router": "mlp.router",
        "mlp.experts.gate_up_proj": Stored("mlp.experts.gate_up", "alternating_transposed"),
        "mlp.experts.gate_up_proj_bias": Stored("mlp.experts.gate_up", "alternating", "bias"),
        "mlp.experts.down_proj": Stored("mlp.experts.down", "stack_transposed"),
        "mlp.experts.down_proj_bias": Stored("mlp.experts.down", "stack", "bias"),
    }
)
YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, truncate=False, original_max_position_embeddings=32)
MOE = TINY | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, rope_parameters=YARN)


@family(
    "GptOssForCausalLM",
    like=[
        MOE | dict(sliding_window=12, num_hidden_layers=3),
        MOE | dict(attention_bias=False, num_local_experts=8, num_experts_per_tok=4, sliding_window=70),
    ],
)
def gpt_oss(c: Config) -> ModelSpec:
    c.ignore("initial_context_length", "experts_per_token")
    for key, value in (("hidden_act", "silu"), ("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        c.only(key, value)
    if not (c.values.get("rope_parameters") or c.values.get("rope_scaling")):
        c.refuse("rope_scaling", "must say how positions are scaled")
    size, norm, bias = head_size(c, 64), rms_norm(c, eps=1e-5), c.flag("attention_bias", True)
    one = attention(c, rope=rope(c, size, theta=150000.0), size=size, qkv_bias=bias, out_bias=bias)
    mixture = experts(c, count=128, chosen=4, kind="swiglu_oai", normalizes=True, bias=True, router_bias=True)
    slides = windows(c, window(c, default=128), [(i + 1) % 2 == 1 for i in range(num_layers(c))])
    layers = [Block(SinkAttention(**vars(replace(one, window=slide))), mixture, norm, norm) for slide in slides]
    return model(c, layers=layers, norm=norm, names=LLAMA | EXPERTS | GPT_OSS, tied=False)
