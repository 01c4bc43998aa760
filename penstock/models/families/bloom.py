"""BLOOM: ALiBi instead of positions, a norm on the embeddings."""

from __future__ import annotations

from penstock.models.config import MAX_POSITIONS, Config
from penstock.models.families.parts import (
    alibi_slopes,
    attention,
    embedding,
    layer_norm,
    mlp,
    model,
    num_heads,
    num_layers,
)
from penstock.models.names import Names, Stored
from penstock.models.spec import Block, ModelSpec, family

BLOOM = Names(
    prefixes=("transformer.",),
    stack="h",
    model={
        "word_embeddings": "embedding.tokens",
        "word_embeddings_layernorm": "embedding.norm",
        "ln_f": "norm",
        "lm_head": "head.rows",
    },
    layer={
        "input_layernorm": "attention_norm",
        "self_attention.query_key_value": Stored("attention.qkv", "grouped"),
        "self_attention.dense": "attention.out",
        "post_attention_layernorm": "mlp_norm",
        "mlp.dense_h_to_4h": "mlp.up",
        "mlp.dense_4h_to_h": "mlp.down",
    },
)
# Settings of training that change nothing here.
TRAINING = (
    "attention_softmax_in_fp32",
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
)
TINY = dict(vocab_size=256, hidden_size=64, n_layer=2, n_head=4)


@family("BloomForCausalLM", like=[TINY, TINY | dict(n_head=6, hidden_size=48)])
def bloom(c: Config) -> ModelSpec:
    c.ignore(*TRAINING)
    c.only("apply_residual_connection_post_layernorm", False)
    norm = layer_norm(c, "layer_norm_epsilon")
    inner = attention(c, num_kv_heads=num_heads(c), alibi=alibi_slopes(num_heads(c)), qkv_bias=True, out_bias=True)
    block = Block(inner, mlp(c, "gelu_tanh", bias=True), mixer_norm=norm, ffn_norm=norm)
    positions = c.count("seq_length", "max_position_embeddings", default=2048, most=MAX_POSITIONS)
    return model(
        c,
        layers=[block] * num_layers(c),
        norm=norm,
        names=BLOOM,
        tied=True,
        positions=positions,
        embed=embedding(c, norm=norm),
    )
