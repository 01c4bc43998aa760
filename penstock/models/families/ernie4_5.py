"""ERNIE 4.5: Llama whose RoPE turns pairs of neighbours; the larger models have experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import MAX_HIDDEN, MAX_LAYERS, Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import (
    MAX_EXPERTS,
    activation,
    attention,
    experts,
    gated_mlp,
    head_size,
    model,
    num_layers,
    rms_norm,
)
from penstock.models.layer import Ffn
from penstock.models.names import EXPERTS, LLAMA, Names, Stored
from penstock.models.spec import Block, ModelSpec, family


def build_ernie(c: Config, ffns: list[Ffn], size: int, names: Names) -> ModelSpec:
    bias, norm = c.flag("use_bias", False), rms_norm(c, eps=1e-5)
    turn = replace(rope(c, size, theta=500000.0), interleaved=True)
    mixer = attention(c, rope=turn, size=size, qkv_bias=bias, out_bias=bias)
    layers = [Block(mixer, ffn, mixer_norm=norm, ffn_norm=norm) for ffn in ffns]
    return model(c, layers=layers, norm=norm, names=names, tied=True)


@family(
    "Ernie4_5ForCausalLM",
    like=[TINY | dict(head_dim=24), TINY | dict(head_dim=16, use_bias=True, tie_word_embeddings=False)],
)
def ernie4_5(c: Config) -> ModelSpec:
    feed = gated_mlp(c, activation(c, default="silu"), c.flag("use_bias", False))
    return build_ernie(c, [feed] * num_layers(c), head_size(c, 128), LLAMA)


SELECTION = Stored("mlp.selection", "stack", "bias")  # [1, E]
ERNIE_MOE = Names(
    layer={
        "mlp.moe_statics.e_score_correction_bias": SELECTION,
        "mlp.gate.moe_statics.e_score_correction_bias": SELECTION,
    },
    ignored=("mtp_",),
)
MOE = TINY | dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=32, num_hidden_layers=3)


@family(
    "Ernie4_5_MoeForCausalLM",
    like=[
        MOE,
        MOE | dict(moe_num_shared_experts=0, moe_layer_interval=2, moe_layer_start_index=0, tie_word_embeddings=False),
        MOE | dict(moe_layer_end_index=1, moe_layer_start_index=0, moe_num_shared_experts=1),
    ],
)
def ernie4_5_moe(c: Config) -> ModelSpec:
    c.only("use_bias", False)
    c.only("moe_use_aux_free", True)
    c.ignore("moe_norm_min", "moe_capacity", "num_nextn_predict_layers")
    count, wide = num_layers(c), c.count("moe_intermediate_size", default=1536, most=MAX_HIDDEN)
    shared = c.count("moe_num_shared_experts", default=2, least=0, most=MAX_EXPERTS)
    mixture = experts(
        c, "moe_intermediate_size", count=64, chosen=6, shared=wide * shared, normalizes=True, selection_bias=True
    )
    step = c.count("moe_layer_interval", default=1, most=MAX_LAYERS)
    first = c.count("moe_layer_start_index", default=1, least=0, most=MAX_LAYERS)
    last = c.count("moe_layer_end_index", default=-1, least=-1, most=MAX_LAYERS) % (MAX_LAYERS + 1)
    feed = gated_mlp(c, activation(c, default="silu"))
    ffns: list[Ffn] = [mixture if (i + 1) % step == 0 and first <= i <= last else feed for i in range(count)]
    return build_ernie(c, ffns, head_size(c), LLAMA | EXPERTS | ERNIE_MOE)
