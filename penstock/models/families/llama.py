"""Llama 1, 2 and 3, and the many models of its shape."""

from __future__ import annotations

from penstock.models.config import Config, rope
from penstock.models.families.parts import activation, attention, gated_mlp, head_size, model, num_layers, rms_norm
from penstock.models.names import LLAMA
from penstock.models.spec import Block, ModelSpec, family

TINY = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


@family(
    "LlamaForCausalLM",
    like=[
        TINY,
        TINY | dict(head_dim=24, num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        TINY | dict(rope_parameters=LLAMA3),
        TINY | dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
        TINY
        | dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0), max_position_embeddings=64),
        TINY
        | dict(
            rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
        ),
    ],
)
def llama(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", False)
    c.only("rope_interleaved", False)
    block = Block(
        attention(c, rope=rope(c, head_size(c)), qkv_bias=bias, out_bias=bias),
        gated_mlp(c, activation(c, default="silu"), c.flag("mlp_bias", False)),
        mixer_norm=rms_norm(c),
        ffn_norm=rms_norm(c),
    )
    return model(c, layers=[block] * num_layers(c), norm=rms_norm(c), names=LLAMA, tied=False)
