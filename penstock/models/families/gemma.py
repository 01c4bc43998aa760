"""Gemma 1, 2 and 3 (text): scaled embeddings, norm weights stored less one; then sandwich norms, windows, QK-norm."""

from __future__ import annotations

from penstock.models.config import MAX_LAYERS, Config, rope
from penstock.models.families.llama import TINY as LLAMA_TINY
from penstock.models.families.parts import (
    ACTIVATIONS,
    attention,
    embedding,
    gated_mlp,
    head_size,
    model,
    num_layers,
    rms_norm,
    width,
    window,
    windows,
)
from penstock.models.layer import Attention
from penstock.models.names import LLAMA, OUT_NORMS, QK_NORM, Names, one_plus
from penstock.models.spec import AnyBlock, Block, ModelSpec, OutputNormBlock, family

HEAD_SIZE = 256  # if the config names none
TINY = LLAMA_TINY | dict(head_dim=24)
# "gelu" in a Gemma config means its tanh form.
GEMMA_ACTIVATIONS = ACTIVATIONS | {"gelu": "gelu_tanh"}


def gemma_model(c: Config, layers: list[AnyBlock], names: Names, softcap: float = 0.0) -> ModelSpec:
    c.only("use_bidirectional_attention", False)
    return model(
        c,
        layers=layers,
        norm=rms_norm(c),
        names=one_plus(names),
        tied=True,
        softcap=softcap,
        embed=embedding(c, scale=width(c) ** 0.5),
    )


def sandwich(c: Config, inner: Attention) -> AnyBlock:
    norm = rms_norm(c)
    return OutputNormBlock(
        inner, gated_mlp(c, gemma_activation(c)), mixer_norm=norm, mixer_out_norm=norm, ffn_norm=norm, ffn_out_norm=norm
    )


def gemma_activation(c: Config) -> str:
    return c.choice("hidden_activation", "hidden_act", choices=GEMMA_ACTIVATIONS, default="gelu_pytorch_tanh")


def softcap_of(c: Config, name: str, default: float) -> float:
    """Return the soft cap; 0 if the key is null."""
    return 0.0 if name in c.values and c.values[name] is None else c.number(name, default=default, above=0.0)


@family("GemmaForCausalLM", like=TINY | dict(num_key_value_heads=1))
def gemma(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", False)
    size = head_size(c, HEAD_SIZE)
    block = Block(
        attention(c, rope=rope(c, size), size=size, qkv_bias=bias, out_bias=bias),
        gated_mlp(c, gemma_activation(c)),
        mixer_norm=rms_norm(c),
        ffn_norm=rms_norm(c),
    )
    return gemma_model(c, [block] * num_layers(c), LLAMA)


@family(
    "Gemma2ForCausalLM",
    like=TINY
    | dict(
        num_hidden_layers=4,
        sliding_window=10,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
)
def gemma2(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", False)
    scale = c.number("query_pre_attn_scalar", default=256.0, above=0.0) ** -0.5
    cap = softcap_of(c, "attn_logit_softcapping", 50.0)
    size = head_size(c, HEAD_SIZE)
    slides = [index % 2 == 0 for index in range(num_layers(c))]
    layers = [
        sandwich(
            c,
            attention(
                c, rope=rope(c, size), size=size, scale=scale, window=slide, softcap=cap, qkv_bias=bias, out_bias=bias
            ),
        )
        for slide in windows(c, window(c, default=4096), slides)
    ]
    return gemma_model(c, layers, LLAMA | OUT_NORMS, softcap_of(c, "final_logit_softcapping", 30.0))


@family(
    "Gemma3ForCausalLM",
    like=[
        TINY
        | dict(
            num_hidden_layers=4,
            sliding_window=10,
            query_pre_attn_scalar=20,
            num_key_value_heads=1,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        ),
        TINY
        | dict(
            num_hidden_layers=3,
            sliding_window=8,
            rope_theta=5000.0,
            rope_local_base_freq=500.0,
            sliding_window_pattern=2,
            final_logit_softcapping=4.0,
            rope_scaling=dict(rope_type="linear", factor=4.0),
        ),
    ],
)
def gemma3(c: Config) -> ModelSpec:
    bias, size = c.flag("attention_bias", False), head_size(c, HEAD_SIZE)
    scale = c.number("query_pre_attn_scalar", default=256.0, above=0.0) ** -0.5
    c.only("attn_logit_softcapping")
    every = c.count("sliding_window_pattern", "_sliding_window_pattern", default=6, most=MAX_LAYERS)
    near = rope(c, size, layer_type="sliding_attention", theta_keys=["rope_local_base_freq"])
    far = rope(c, size, theta=1000000.0)
    slides = [(index + 1) % every > 0 for index in range(num_layers(c))]
    norm = rms_norm(c, size)
    layers = [
        sandwich(
            c,
            attention(
                c,
                rope=near if slide else far,
                size=size,
                scale=scale,
                window=slide,
                qkv_bias=bias,
                out_bias=bias,
                q_norm=norm,
                k_norm=norm,
            ),
        )
        for slide in windows(c, window(c, default=4096), slides)
    ]
    return gemma_model(c, layers, LLAMA | OUT_NORMS | QK_NORM, softcap_of(c, "final_logit_softcapping", 0.0))
