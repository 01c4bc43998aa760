"""Granite: Llama with a multiplier on the embeddings, the attention scores, the residuals and the logits."""

from __future__ import annotations

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import (
    activation,
    attention,
    embedding,
    gated_mlp,
    head_size,
    model,
    num_layers,
    rms_norm,
)
from penstock.models.names import LLAMA
from penstock.models.spec import ModelSpec, ScaledBlock, family

MULTIPLIERS = dict(embedding_multiplier=6.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=4.0)


@family(
    "GraniteForCausalLM",
    like=[TINY | MULTIPLIERS, TINY | MULTIPLIERS | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)],
)
def granite(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", False)
    scale = c.number("attention_multiplier", default=1.0, above=0.0)
    block = ScaledBlock(
        attention(c, rope=rope(c, head_size(c)), scale=scale, qkv_bias=bias, out_bias=bias),
        gated_mlp(c, activation(c, default="silu"), c.flag("mlp_bias", False)),
        mixer_norm=rms_norm(c),
        ffn_norm=rms_norm(c),
        scale=c.number("residual_multiplier", default=1.0, above=0.0),
    )
    return model(
        c,
        layers=[block] * num_layers(c),
        norm=rms_norm(c),
        names=LLAMA,
        tied=False,
        embed=embedding(c, scale=c.number("embedding_multiplier", default=1.0, above=0.0)),
        divisor=c.number("logits_scaling", default=1.0, above=0.0),
    )
