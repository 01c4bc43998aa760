"""OLMo 2: norms after attention and MLP only, and on all queries and all keys together."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import activation, attention, gated_mlp, head_size, model, num_layers, rms_norm
from penstock.models.names import LLAMA, OUT_NORMS, QK_NORM
from penstock.models.spec import ModelSpec, OutputNormBlock, family


@family("Olmo2ForCausalLM", like=TINY)
def olmo2(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", False)
    plain = attention(c, rope=rope(c, head_size(c)), qkv_bias=bias, out_bias=bias)
    queries, keys, _ = plain.rows
    inner = replace(plain, q_norm=rms_norm(c, queries, eps=1e-5), k_norm=rms_norm(c, keys, eps=1e-5))
    norm = rms_norm(c, eps=1e-5)
    feed = gated_mlp(c, activation(c, default="silu"))
    block = OutputNormBlock(inner, feed, None, None, norm, norm)
    return model(c, layers=[block] * num_layers(c), norm=norm, names=LLAMA | OUT_NORMS | QK_NORM, tied=False)
