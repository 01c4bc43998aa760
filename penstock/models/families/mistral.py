"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from penstock.models.block import Block
from penstock.models.config import Config
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
from penstock.models.registry import family
from penstock.models.rope import rope
from penstock.models.spec import ModelSpec


@family("MistralForCausalLM", like=[TINY | dict(sliding_window=12), TINY | dict(sliding_window=None, head_dim=32)])
def mistral(c: Config) -> ModelSpec:
    size = window(c, default=4096)
    layers = [
        Block(
            attention(c, rope=rope(c, head_size(c)), window=slide),
            gated_mlp(c, activation(c, default="silu")),
            attention_norm=rms_norm(c),
            mlp_norm=rms_norm(c),
        )
        for slide in windows(c, size, [size > 0] * num_layers(c))
    ]
    return model(c, layers=layers, norm=rms_norm(c), names=LLAMA, tied=False)
