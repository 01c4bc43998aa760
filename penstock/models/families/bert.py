"""BERT as an encoder for sentence embeddings."""

from __future__ import annotations

from penstock.models.config import MAX_POSITIONS, Config
from penstock.models.families.parts import (
    activation,
    embedding,
    head_size,
    layer_norm,
    mlp,
    model,
    num_heads,
    num_layers,
    width,
)
from penstock.models.layer import EncoderAttention
from penstock.models.names import IGNORED, Names
from penstock.models.spec import ModelSpec, PostNormBlock, family

BERT = Names(
    prefixes=("bert.",),
    stack="encoder.layer",
    model={
        "embeddings.word_embeddings": "embedding.tokens",
        "embeddings.position_embeddings": "embedding.positions",
        "embeddings.token_type_embeddings": "embedding.types",
        "embeddings.LayerNorm": "embedding.norm",
        "embeddings": IGNORED,
        "pooler.dense": IGNORED,
    },
    layer={
        "attention.self.query": "attention.q",
        "attention.self.key": "attention.k",
        "attention.self.value": "attention.v",
        "attention.output.dense": "attention.out",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "mlp.up",
        "output.dense": "mlp.down",
        "output.LayerNorm": "mlp_norm",
    },
)

# The pooler of next-sentence prediction; embeddings do not use it.
POOLER = (
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "directionality",
)


@family(
    "BertModel",
    like=dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
)
def bert(c: Config) -> ModelSpec:
    c.ignore(*POOLER)
    c.only("position_embedding_type", "absolute")
    c.only("is_decoder", False)
    c.only("add_cross_attention", False)
    norm = layer_norm(c, "layer_norm_eps", eps=1e-12)
    size = head_size(c)
    block = PostNormBlock(
        EncoderAttention(width(c), num_heads(c), size, size**-0.5),
        mlp(c, activation(c, default="gelu"), bias=True),
        norm,
        norm,
    )
    positions = c.count("max_position_embeddings", most=MAX_POSITIONS)
    return model(
        c,
        layers=[block] * num_layers(c),
        norm=None,
        names=BERT,
        tied=True,
        positions=positions,
        head=False,
        embed=embedding(
            c, num_positions=positions, norm=norm, num_types=c.count("type_vocab_size", default=2, most=1024)
        ),
    )
