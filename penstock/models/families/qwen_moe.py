"""Qwen 2 and Qwen 3 with mixtures of experts; some layers may be dense."""

from __future__ import annotations

from penstock.models.config import MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS, Config, rope
from penstock.models.experts import Experts
from penstock.models.families.llama import TINY
from penstock.models.families.parts import (
    activation,
    attention,
    experts,
    gated_mlp,
    head_size,
    model,
    num_layers,
    rms_norm,
    windows,
)
from penstock.models.layer import Attention
from penstock.models.names import EXPERTS, LLAMA, QK_NORM, Names
from penstock.models.spec import Block, ModelSpec, family

MOE = TINY | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)


def window(c: Config) -> int:
    size = c.count("sliding_window", default=4096, least=0, most=MAX_POSITIONS)
    return size if c.flag("use_sliding_window", False) else 0


def qwen_moe(c: Config, attentions: list[Attention], mixture: Experts, names: Names) -> ModelSpec:
    step = c.count("decoder_sparse_step", default=1, most=MAX_LAYERS)
    dense = c.places("mlp_only_layers", num_layers(c)) | {i for i in range(num_layers(c)) if (i + 1) % step}
    feed = gated_mlp(c, activation(c, default="silu"))
    layers = [
        Block(one, feed if i in dense else mixture, mixer_norm=rms_norm(c), ffn_norm=rms_norm(c))
        for i, one in enumerate(attentions)
    ]
    return model(c, layers=layers, norm=rms_norm(c), names=names, tied=False)


SHARED = dict(shared_expert_intermediate_size=48)


@family(
    "Qwen2MoeForCausalLM",
    like=[
        MOE | SHARED,
        MOE | SHARED | dict(norm_topk_prob=True, qkv_bias=False, mlp_only_layers=[1], num_hidden_layers=3),
        MOE
        | SHARED
        | dict(use_sliding_window=True, sliding_window=9, max_window_layers=2, num_hidden_layers=4)
        | dict(decoder_sparse_step=2, num_experts_per_tok=5, num_experts=5),
    ],
)
def qwen2_moe(c: Config) -> ModelSpec:
    turn, bias, size = rope(c, head_size(c)), c.flag("qkv_bias", True), window(c)
    first = c.count("max_window_layers", default=28, least=0, most=MAX_LAYERS)
    slides = windows(c, size, [size > 0 and (i + 1) % 2 == 1 and i < first for i in range(num_layers(c))])
    attentions = [attention(c, rope=turn, window=slide, qkv_bias=bias) for slide in slides]
    shared = c.count("shared_expert_intermediate_size", default=5632, most=MAX_HIDDEN)
    normalizes = c.flag("norm_topk_prob", False)
    mixture = experts(
        c, "moe_intermediate_size", count=60, chosen=4, shared=shared, shared_gate=True, normalizes=normalizes
    )
    return qwen_moe(c, attentions, mixture, LLAMA | EXPERTS)


@family(
    "Qwen3MoeForCausalLM",
    like=[
        MOE | dict(head_dim=24, norm_topk_prob=True),
        MOE | dict(head_dim=16, attention_bias=True, mlp_only_layers=[0], num_hidden_layers=3),
        MOE | dict(head_dim=16, use_sliding_window=True, sliding_window=9, num_hidden_layers=4, decoder_sparse_step=2),
    ],
)
def qwen3_moe(c: Config) -> ModelSpec:
    c.ignore("max_window_layers")
    for key, usual in dict(use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0).items():  # Qwen3-Coder
        c.only(key, usual)
    size, bias = head_size(c), c.flag("attention_bias", False)
    norm, turn, slide = rms_norm(c, size), rope(c, size), window(c)
    one = attention(c, rope=turn, size=size, window=slide, qkv_bias=bias, out_bias=bias, q_norm=norm, k_norm=norm)
    normalizes = c.flag("norm_topk_prob", False)
    mixture = experts(c, "moe_intermediate_size", count=128, chosen=8, normalizes=normalizes)
    return qwen_moe(c, [one] * num_layers(c), mixture, LLAMA | QK_NORM | EXPERTS)
