"""Falcon: multi-query (7B), grouped (40B, 180B, 11B) and ALiBi (RW) models."""

from __future__ import annotations

import struct

from penstock.models.config import MAX_HEADS, MAX_POSITIONS, Config, max_positions, rope
from penstock.models.families.parts import (
    activation,
    alibi_slopes,
    attention,
    head_size,
    layer_norm,
    mlp,
    model,
    num_heads,
    num_layers,
)
from penstock.models.layer import Attention
from penstock.models.names import Names, Stored
from penstock.models.spec import AnyBlock, Block, ModelSpec, ParallelBlock, family

FALCON = Names(
    prefixes=("transformer.",),
    stack="h",
    model={"word_embeddings": "embedding.tokens", "ln_f": "norm", "lm_head": "head.rows"},
    layer={
        "input_layernorm": "attention_norm",
        "ln_attn": "attention_norm",
        "self_attention.query_key_value": Stored("attention.qkv", "grouped"),
        "self_attention.dense": "attention.out",
        "ln_mlp": "mlp_norm",
        "post_attention_layernorm": "mlp_norm",
        "mlp.dense_h_to_4h": "mlp.up",
        "mlp.dense_4h_to_h": "mlp.down",
    },
)
TINY = dict(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)


def bfloat16(value: float) -> float:
    """Round to bfloat16, nearest even, as Falcon's slopes were trained."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


def falcon_attention(c: Config, grouped: bool) -> Attention:
    heads, bias, size = num_heads(c), c.flag("bias", False), head_size(c)
    kv_heads = c.count("num_kv_heads", default=heads, most=MAX_HEADS)
    if not grouped:
        kv_heads = 1 if c.flag("multi_query", True) else heads
    c.ignore("multi_query")
    if not c.flag("alibi", False):
        return attention(c, rope=rope(c, size), num_kv_heads=kv_heads, qkv_bias=bias, out_bias=bias)
    c.ignore("rope_parameters", "rope_scaling", "rope_theta")
    # The slopes are added before the scores are scaled.
    slopes = [bfloat16(slope) * size**-0.5 for slope in alibi_slopes(heads)]
    return attention(c, alibi=slopes, num_kv_heads=kv_heads, qkv_bias=bias, out_bias=bias)


@family(
    "FalconForCausalLM",
    like=[
        TINY,
        TINY | dict(new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False),
        TINY | dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, ffn_hidden_size=80),
        TINY | dict(alibi=True, bias=True, multi_query=False, parallel_attn=False),
    ],
)
def falcon(c: Config) -> ModelSpec:
    grouped = c.flag("new_decoder_architecture", False)
    parallel = c.flag("parallel_attn", True)
    c.only("apply_residual_connection_post_layernorm", False)
    if grouped and not parallel:
        c.refuse("parallel_attn", "is not supported with new_decoder_architecture")
    num_norms = c.count("num_ln_in_parallel_attn", default=2 if grouped else 1, most=2)
    if num_norms == 2 and not grouped:
        c.refuse("num_ln_in_parallel_attn", "is not supported without new_decoder_architecture")
    inner, norm = falcon_attention(c, grouped), layer_norm(c, "layer_norm_epsilon")
    feed = mlp(c, activation(c, "activation", default="gelu"), c.flag("bias", False))
    block: AnyBlock = ParallelBlock(inner, feed, norm, norm if num_norms == 2 else None)
    if not parallel:
        block = Block(inner, feed, mixer_norm=norm, ffn_norm=norm)
    positions = c.count("max_position_embeddings", default=2048, most=MAX_POSITIONS)
    if inner.rope is not None and c.values.get("max_position_embeddings") is not None:
        positions = max_positions(c)
    return model(c, layers=[block] * num_layers(c), norm=norm, names=FALCON, tied=True, positions=positions)
