"""Command R and Command R7B: attention and MLP side by side after one layer norm, and logits that are scaled."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import MAX_LAYERS, Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import (
    activation,
    attention,
    gated_mlp,
    head_size,
    model,
    num_layers,
    width,
    window,
    windows,
)
from penstock.models.layer import Attention, LayerNorm
from penstock.models.names import LLAMA
from penstock.models.spec import ModelSpec, ParallelBlock, family


def build_cohere(c: Config, attentions: list[Attention]) -> ModelSpec:
    norm = LayerNorm(width(c), c.number("layer_norm_eps", default=1e-5, most=1.0), bias=False)
    feed = gated_mlp(c, activation(c, default="silu"))
    divisor = 1.0 / c.number("logit_scale", default=0.0625, above=0.0)
    layers = [ParallelBlock(one, feed, mixer_norm=norm) for one in attentions]
    return model(c, layers=layers, norm=norm, names=LLAMA, tied=True, divisor=divisor)


@family(
    "CohereForCausalLM",
    like=[TINY | dict(logit_scale=0.5), TINY | dict(attention_bias=True, logit_scale=0.3, tie_word_embeddings=False)],
)
def cohere(c: Config) -> ModelSpec:
    c.only("use_qk_norm", False)
    bias, size = c.flag("attention_bias", False), head_size(c)
    turn = replace(rope(c, size, theta=500000.0), interleaved=True)
    return build_cohere(c, [attention(c, rope=turn, qkv_bias=bias, out_bias=bias)] * num_layers(c))


# Command R7B's own code has switches that its checkpoints leave at these values.
COHERE2 = dict(
    position_embedding_type="rope_gptj",
    order_of_interleaved_layers="local_attn_first",
    use_embedding_sharing=True,
    use_gated_activation=True,
    use_parallel_block=True,
)


@family(
    "Cohere2ForCausalLM",
    like=[
        TINY | dict(num_hidden_layers=4, sliding_window=11, logit_scale=0.5),
        TINY
        | dict(num_hidden_layers=3, sliding_window=30, attention_bias=True, logit_scale=0.4)
        | dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ],
)
def cohere2(c: Config) -> ModelSpec:
    for key, usual in COHERE2.items():
        c.only(key, usual)
    c.ignore("layer_switch", "use_parallel_embedding")
    bias, size = c.flag("attention_bias", False), head_size(c)
    turn = replace(rope(c, size, fraction_keys=["rotary_pct", "partial_rotary_factor"]), interleaved=True)
    every = c.count("sliding_window_pattern", default=4, most=MAX_LAYERS)
    slides = windows(c, window(c, default=4096), [(i + 1) % every > 0 for i in range(num_layers(c))])
    plain = attention(c, qkv_bias=bias, out_bias=bias, size=size)
    return build_cohere(c, [replace(plain, window=slide, rope=turn) if slide else plain for slide in slides])
