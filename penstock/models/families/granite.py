"""Granite, dense and with experts: Llama with a multiplier on embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import (
    activation,
    attention,
    embedding,
    experts,
    gated_mlp,
    head_size,
    model,
    num_layers,
    rms_norm,
)
from penstock.models.layer import Ffn
from penstock.models.names import EXPERTS, LLAMA, Names, Stored
from penstock.models.spec import ModelSpec, ScaledBlock, family

MULTIPLIERS = dict(embedding_multiplier=6.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=4.0)


def build_granite(c: Config, ffn: Ffn, names: Names) -> ModelSpec:
    bias = c.flag("attention_bias", False)
    scale = c.number("attention_multiplier", default=1.0, above=0.0)
    block = ScaledBlock(
        attention(c, rope=rope(c, head_size(c)), scale=scale, qkv_bias=bias, out_bias=bias),
        ffn,
        mixer_norm=rms_norm(c),
        ffn_norm=rms_norm(c),
        scale=c.number("residual_multiplier", default=1.0, above=0.0),
    )
    return model(
        c,
        layers=[block] * num_layers(c),
        norm=rms_norm(c),
        names=names,
        tied=False,
        embed=embedding(c, scale=c.number("embedding_multiplier", default=1.0, above=0.0)),
        divisor=c.number("logits_scaling", default=1.0, above=0.0),
    )


@family(
    "GraniteForCausalLM",
    like=[TINY | MULTIPLIERS, TINY | MULTIPLIERS | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)],
)
def granite(c: Config) -> ModelSpec:
    return build_granite(c, gated_mlp(c, activation(c, default="silu"), c.flag("mlp_bias", False)), LLAMA)


GRANITE_MOE = Names(
    layer={
        "block_sparse_moe.router": "mlp.router",
        "block_sparse_moe.router.layer": "mlp.router",
        "block_sparse_moe.input_linear": Stored("mlp.experts.gate_up", "stack"),
        "block_sparse_moe.output_linear": Stored("mlp.experts.down", "stack"),
        "block_sparse_moe.experts.gate_up_proj": Stored("mlp.experts.gate_up", "stack"),
        "block_sparse_moe.experts.down_proj": Stored("mlp.experts.down", "stack"),
    }
)


@family(
    "GraniteMoeForCausalLM",
    like=[
        TINY | MULTIPLIERS | dict(num_local_experts=6, num_experts_per_tok=3),
        TINY | MULTIPLIERS | dict(num_local_experts=4, attention_bias=True, tie_word_embeddings=True),
    ],
)
def granite_moe(c: Config) -> ModelSpec:
    return build_granite(c, experts(c, normalizes=True), LLAMA | GRANITE_MOE | EXPERTS)
