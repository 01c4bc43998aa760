"""Qwen 2 (QKV biases), MiMo, which is one, and Qwen 3 (QK-norm)."""

from __future__ import annotations

from penstock.models.config import MAX_LAYERS, Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import (
    activation,
    attention,
    gated_mlp,
    head_size,
    model,
    num_layers,
    rms_norm,
    window,
    windows,
)
from penstock.models.layer import Attention
from penstock.models.names import IGNORED, LLAMA, QK_NORM, Names
from penstock.models.spec import Block, ModelSpec, family

SLIDING = dict(use_sliding_window=True, sliding_window=9, max_window_layers=1, num_hidden_layers=3)


def layer_windows(c: Config) -> list[int]:
    """Return each layer's window; with windows on, layers from max_window_layers on have one."""
    size, first = window(c, default=4096), c.count("max_window_layers", default=28, least=0, most=MAX_LAYERS)
    if not c.flag("use_sliding_window", False):
        size, first = 0, num_layers(c)
    return windows(c, size, [index >= first for index in range(num_layers(c))])


def qwen(c: Config, attentions: list[Attention], names: Names) -> ModelSpec:
    feed = gated_mlp(c, activation(c, default="silu"))
    layers = [Block(one, feed, mixer_norm=rms_norm(c), ffn_norm=rms_norm(c)) for one in attentions]
    return model(c, layers=layers, norm=rms_norm(c), names=names, tied=False)


@family("Qwen2ForCausalLM", like=[TINY, TINY | SLIDING])
def qwen2(c: Config) -> ModelSpec:
    turn = rope(c, head_size(c))
    return qwen(c, [attention(c, rope=turn, window=size, qkv_bias=True) for size in layer_windows(c)], LLAMA)


MTP_LAYER = (*LLAMA.layer, "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
MIMO = LLAMA | Names(model={f"mtp_layers.*.{name}": IGNORED for name in MTP_LAYER})


@family("MiMoForCausalLM", like=TINY, cpu_only="a comparison of its logits: set device=cpu")
def mimo(c: Config) -> ModelSpec:
    """Qwen 2 with a layer that drafts (`penstock.draft.net.mtp`)."""
    c.ignore("num_nextn_predict_layers")
    c.only("attention_bias", True)
    turn = rope(c, head_size(c))
    return qwen(c, [attention(c, rope=turn, window=size, qkv_bias=True) for size in layer_windows(c)], MIMO)


@family("Qwen3ForCausalLM", like=[TINY | dict(head_dim=24), TINY | SLIDING | dict(head_dim=16, attention_bias=True)])
def qwen3(c: Config) -> ModelSpec:
    size, bias = head_size(c, 128), c.flag("attention_bias", False)
    norm = rms_norm(c, size)
    layers = [
        attention(
            c, rope=rope(c, size), size=size, window=slide, qkv_bias=bias, out_bias=bias, q_norm=norm, k_norm=norm
        )
        for slide in layer_windows(c)
    ]
    return qwen(c, layers, LLAMA | QK_NORM)
