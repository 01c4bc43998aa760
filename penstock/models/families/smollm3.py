"""SmolLM3: Llama with positions in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import MAX_LAYERS, Config, rope
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
from penstock.models.names import LLAMA
from penstock.models.spec import Block, ModelSpec, family

SMALL = TINY | dict(pad_token_id=0)


@family(
    "SmolLM3ForCausalLM",
    like=[
        SMALL | dict(num_hidden_layers=4),
        SMALL | dict(no_rope_layers=[0, 1], attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
        SMALL | dict(num_hidden_layers=3, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=9),
    ],
)
def smollm3(c: Config) -> ModelSpec:
    c.ignore("max_window_layers")
    size, bias, count = head_size(c), c.flag("attention_bias", False), num_layers(c)
    interval = c.count("no_rope_layer_interval", default=4, most=MAX_LAYERS)
    turned = c.switches("no_rope_layers", count) or [(i + 1) % interval != 0 for i in range(count)]
    slides = c.flag("use_sliding_window", False) and window(c) > 0
    sizes = windows(c, window(c), [slides and not turns for turns in turned])
    turn = rope(c, size, theta=2000000.0)
    plain = attention(c, size=size, qkv_bias=bias, out_bias=bias)
    feed, norm = gated_mlp(c, activation(c, default="silu"), c.flag("mlp_bias", False)), rms_norm(c)
    layers = [
        Block(replace(plain, window=seen if slides else 0, rope=turn if turns else None), feed, norm, norm)
        for turns, seen in zip(turned, sizes)
    ]
    return model(c, layers=layers, norm=norm, names=LLAMA, tied=True)
