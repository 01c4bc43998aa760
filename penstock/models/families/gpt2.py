"""GPT-2: learned positions, layer norms, matrices stored [in, out]."""

from __future__ import annotations

from penstock.models.config import MAX_POSITIONS, Config
from penstock.models.families.parts import (
    activation,
    attention,
    embedding,
    head_size,
    layer_norm,
    mlp,
    model,
    num_layers,
)
from penstock.models.names import IGNORED, Names, Stored
from penstock.models.spec import Block, ModelSpec, family

GPT2 = Names(
    prefixes=("transformer.",),
    stack="h",
    model={"wte": "embedding.tokens", "wpe": "embedding.positions", "ln_f": "norm", "lm_head": "head.rows"},
    layer={
        "ln_1": "attention_norm",
        "attn.c_attn": Stored("attention.qkv", "transposed"),
        "attn.c_proj": Stored("attention.out", "transposed"),
        "attn": IGNORED,
        "ln_2": "mlp_norm",
        "mlp.c_fc": Stored("mlp.up", "transposed"),
        "mlp.c_proj": Stored("mlp.down", "transposed"),
    },
)
# Heads that are not loaded, and buffers of the first release.
UNUSED = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "n_ctx",
    "n_special",
    "predict_special_tokens",
    "_num_labels",
)
TINY = dict(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=128)


@family(
    "GPT2LMHeadModel",
    like=[TINY, TINY | dict(scale_attn_by_inverse_layer_idx=True, n_inner=80, activation_function="relu")],
)
def gpt2(c: Config) -> ModelSpec:
    c.ignore(*UNUSED, "reorder_and_upcast_attn")
    c.only("add_cross_attention", False)
    scale = head_size(c) ** -0.5 if c.flag("scale_attn_weights", True) else 1.0
    by_layer = c.flag("scale_attn_by_inverse_layer_idx", False)
    norm = layer_norm(c, "layer_norm_epsilon")
    feed = mlp(c, activation(c, "activation_function", default="gelu_new"), bias=True)
    positions = c.count("n_positions", "max_position_embeddings", most=MAX_POSITIONS)
    layers = [
        Block(
            attention(c, scale=scale / (index + 1) if by_layer else scale, qkv_bias=True, out_bias=True),
            feed,
            mixer_norm=norm,
            ffn_norm=norm,
        )
        for index in range(num_layers(c))
    ]
    return model(
        c,
        layers=layers,
        norm=norm,
        names=GPT2,
        tied=True,
        positions=positions,
        embed=embedding(c, num_positions=positions),
    )
