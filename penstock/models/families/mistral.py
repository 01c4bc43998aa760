"""Mistral: Llama with a sliding window."""

from __future__ import annotations

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
from penstock.models.names import LLAMA
from penstock.models.spec import Block, ModelSpec, family


@family("MistralForCausalLM", like=[TINY | dict(sliding_window=12), TINY | dict(sliding_window=None, head_dim=32)])
def mistral(c: Config) -> ModelSpec:
    size = window(c, default=4096)
    layers = [
        Block(
            attention(c, rope=rope(c, head_size(c)), window=slide),
            gated_mlp(c, activation(c, default="silu")),
            mixer_norm=rms_norm(c),
            ffn_norm=rms_norm(c),
        )
        for slide in windows(c, size, [size > 0] * num_layers(c))
    ]
    return model(c, layers=layers, norm=rms_norm(c), names=LLAMA, tied=False)
