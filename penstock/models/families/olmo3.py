"""OLMo 3: OLMo 2 with windows in three of four layers, whose RoPE is not scaled."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import (
    activation,
    attention,
    gated_mlp,
    head_size,
    model,
    num_layers,
    rms_norm,
    window,
    windows,
)
from penstock.models.names import LLAMA, OUT_NORMS, QK_NORM
from penstock.models.spec import ModelSpec, OutputNormBlock, family

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=5000.0)
NEAR = dict(rope_type="default", rope_theta=700.0)


@family(
    "Olmo3ForCausalLM",
    like=[
        TINY | dict(num_hidden_layers=4, sliding_window=9),
        TINY
        | dict(layer_types=["full_attention", "sliding_attention"], sliding_window=20, attention_bias=True)
        | dict(rope_parameters=dict(full_attention=YARN, sliding_attention=NEAR)),
    ],
)
def olmo3(c: Config) -> ModelSpec:
    bias, size = c.flag("attention_bias", False), head_size(c)
    slides = windows(c, window(c, default=4096), [(i + 1) % 4 != 0 for i in range(num_layers(c))])
    near = rope(c, size, layer_type="sliding_attention", theta=500000.0)
    far = rope(c, size, theta=500000.0)
    plain = attention(c, qkv_bias=bias, out_bias=bias)
    queries, keys, _ = plain.rows
    inner = replace(plain, q_norm=rms_norm(c, queries, eps=1e-5), k_norm=rms_norm(c, keys, eps=1e-5))
    norm, feed = rms_norm(c, eps=1e-5), gated_mlp(c, activation(c, default="silu"))
    mixers = [replace(inner, window=slide, rope=near if slide else far) for slide in slides]
    layers = [OutputNormBlock(mixer, feed, None, None, norm, norm) for mixer in mixers]
    return model(c, layers=layers, norm=norm, names=LLAMA | OUT_NORMS | QK_NORM, tied=False)
