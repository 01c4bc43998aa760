"""Phi-3 and Phi-4-mini: Llama with merged projections, partial RoPE and longrope."""

from __future__ import annotations

from penstock.models.config import Config, max_positions, rope
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
)
from penstock.models.names import LLAMA, MERGED
from penstock.models.spec import Block, ModelSpec, family

# Names of longrope in early checkpoints.
ALIASES = {"su": "longrope", "yarn": "longrope"}
LONG = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0 + 0.1 * i for i in range(6)],
    long_factor=[1.5 + 0.5 * i for i in range(6)],
    partial_rotary_factor=0.75,
)
TOKENS = dict(pad_token_id=0)


@family(
    "Phi3ForCausalLM",
    like=[
        TINY | TOKENS | dict(sliding_window=11),
        TINY | TOKENS | dict(rope_parameters=LONG, original_max_position_embeddings=64, tie_word_embeddings=True),
        TINY | TOKENS | dict(rope_parameters=LONG, original_max_position_embeddings=128, max_position_embeddings=128),
    ],
)
def phi3(c: Config) -> ModelSpec:
    c.only("full_attn_mod", 1)
    c.only("interpolate_factor", 1)
    c.ignore("original_max_position_embeddings")
    block = Block(
        attention(c, rope=rope(c, head_size(c), aliases=ALIASES), window=window(c)),
        gated_mlp(c, activation(c, default="silu")),
        mixer_norm=rms_norm(c, eps=1e-5),
        ffn_norm=rms_norm(c, eps=1e-5),
    )
    return model(
        c,
        layers=[block] * num_layers(c),
        norm=rms_norm(c, eps=1e-5),
        names=LLAMA | MERGED,
        tied=False,
        positions=max_positions(c, ALIASES),
    )
