"""GPT-NeoX and Pythia: parallel attention and MLP, partial RoPE."""

from __future__ import annotations

from penstock.models.config import Config, rope
from penstock.models.families.parts import (
    activation,
    attention,
    head_size,
    layer_norm,
    mlp,
    model,
    num_heads,
    num_layers,
)
from penstock.models.names import IGNORED, Names, Stored
from penstock.models.spec import AnyBlock, Block, ModelSpec, ParallelBlock, family

GPT_NEOX = Names(
    prefixes=("gpt_neox.",),
    stack="layers",
    model={
        "embed_in": "embedding.tokens",
        "final_layer_norm": "norm",
        "embed_out": "head.rows",
        "lm_head": "head.rows",
        "rotary_emb": IGNORED,
    },
    layer={
        "input_layernorm": "attention_norm",
        "attention.query_key_value": Stored("attention.qkv", "grouped"),
        "attention.dense": "attention.out",
        "attention": IGNORED,
        "attention.rotary_emb": IGNORED,
        "post_attention_layernorm": "mlp_norm",
        "mlp.dense_h_to_4h": "mlp.up",
        "mlp.dense_4h_to_h": "mlp.down",
    },
)
TINY = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
)


@family(
    "GPTNeoXForCausalLM",
    like=[TINY, TINY | dict(use_parallel_residual=False, rotary_pct=0.5, attention_bias=False, hidden_act="gelu_new")],
)
def gpt_neox(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", True)
    turn = rope(
        c,
        head_size(c),
        theta_keys=["rotary_emb_base", "rope_theta"],
        fraction=0.25,
        fraction_keys=["rotary_pct", "partial_rotary_factor"],
    )
    inner = attention(c, rope=turn, num_kv_heads=num_heads(c), qkv_bias=bias, out_bias=bias)
    feed = mlp(c, activation(c, default="gelu"), bias=True)
    norm = layer_norm(c, "layer_norm_eps")
    block: AnyBlock = ParallelBlock(inner, feed, norm, norm)
    if not c.flag("use_parallel_residual", True):
        block = Block(inner, feed, mixer_norm=norm, ffn_norm=norm)
    return model(c, layers=[block] * num_layers(c), norm=norm, names=GPT_NEOX, tied=False)
