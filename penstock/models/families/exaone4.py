"""EXAONE 4: norms after attention and MLP only, QK-norm; where some layers slide, the others have no positions."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import MAX_LAYERS, Config, rope
from penstock.models.families.llama import LLAMA3, TINY
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


@family(
    "Exaone4ForCausalLM",
    like=[
        TINY | dict(num_hidden_layers=4, sliding_window=9),
        TINY | dict(sliding_window=None, layer_types=["full_attention"] * 2, rope_parameters=LLAMA3, head_dim=24),
    ],
)
def exaone4(c: Config) -> ModelSpec:
    size, seen, count = head_size(c), window(c, default=4096), num_layers(c)
    if c.values.get("layer_types") is not None or not seen:
        c.ignore("sliding_window_pattern")
        slides = windows(c, seen, [False] * count)
    else:
        every = c.count("sliding_window_pattern", default=4, most=MAX_LAYERS)
        slides = windows(c, seen, [(i + 1) % every != 0 for i in range(count)])
    norm, turn = rms_norm(c, size, eps=1e-5), rope(c, size)
    plain = attention(c, size=size, q_norm=norm, k_norm=norm)
    feed, outer = gated_mlp(c, activation(c, default="silu")), rms_norm(c, eps=1e-5)
    mixers = [replace(plain, window=slide, rope=turn if slide or not seen else None) for slide in slides]
    layers = [OutputNormBlock(mixer, feed, None, None, outer, outer) for mixer in mixers]
    return model(c, layers=layers, norm=outer, names=LLAMA | OUT_NORMS | QK_NORM, tied=False)
