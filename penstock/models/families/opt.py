"""OPT: learned positions that begin at row 2; the 350M model is post-norm and has narrower embeddings."""

from __future__ import annotations

from penstock.models.config import MAX_POSITIONS, MAX_WIDTH, Config
from penstock.models.families.parts import (
    activation,
    attention,
    embedding,
    layer_norm,
    mlp,
    model,
    num_heads,
    num_layers,
    width,
)
from penstock.models.names import Names
from penstock.models.spec import AnyBlock, Block, ModelSpec, PostNormBlock, family

OFFSET = 2
OPT = Names(
    prefixes=("model.decoder.", "decoder."),
    stack="layers",
    model={
        "embed_tokens": "embedding.tokens",
        "embed_positions": "embedding.positions",
        "project_in": "embedding.project",
        "final_layer_norm": "norm",
        "project_out": "head.project",
        "lm_head": "head.rows",
    },
    layer={
        "self_attn_layer_norm": "attention_norm",
        "self_attn.q_proj": "attention.q",
        "self_attn.k_proj": "attention.k",
        "self_attn.v_proj": "attention.v",
        "self_attn.out_proj": "attention.out",
        "final_layer_norm": "mlp_norm",
        "fc1": "mlp.up",
        "fc2": "mlp.down",
    },
)
TINY = dict(
    vocab_size=256, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128
)


@family(
    "OPTForCausalLM",
    like=[
        TINY,
        TINY | dict(do_layer_norm_before=False, word_embed_proj_dim=48),
        TINY | dict(enable_bias=False, activation_function="gelu"),
    ],
)
def opt(c: Config) -> ModelSpec:
    c.only("layer_norm_elementwise_affine", True)
    c.only("learned_embeddings", True)
    c.only("scale_embeddings", False)
    bias, before = c.flag("enable_bias", True), c.flag("do_layer_norm_before", True)
    inner = attention(c, num_kv_heads=num_heads(c), qkv_bias=bias, out_bias=bias)
    feed, norm = mlp(c, activation(c, "activation_function", default="relu"), bias), layer_norm(c)
    block: AnyBlock = PostNormBlock(inner, feed, norm, norm)
    if before:
        block = Block(inner, feed, mixer_norm=norm, ffn_norm=norm)
    last = norm if before and not c.flag("_remove_final_layer_norm", False) else None
    row = c.count("word_embed_proj_dim", default=width(c), most=MAX_WIDTH)
    positions = c.count("max_position_embeddings", most=MAX_POSITIONS)
    return model(
        c,
        layers=[block] * num_layers(c),
        norm=last,
        names=OPT,
        tied=True,
        positions=positions,
        embed=embedding(c, row_width=row, num_positions=positions + OFFSET, position_offset=OFFSET),
    )
