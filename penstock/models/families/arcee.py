"""Arcee AFM and Seed-OSS: Llama with a plain MLP, and with biases of queries, keys and values."""

from __future__ import annotations

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import activation, attention, gated_mlp, head_size, mlp, model, num_layers, rms_norm
from penstock.models.names import LLAMA
from penstock.models.spec import Block, ModelSpec, family


@family("ArceeForCausalLM", like=[TINY, TINY | dict(head_dim=24, attention_bias=True, mlp_bias=True)])
def arcee(c: Config) -> ModelSpec:
    bias, norm = c.flag("attention_bias", False), rms_norm(c, eps=1e-5)
    mixer = attention(c, rope=rope(c, head_size(c)), qkv_bias=bias, out_bias=bias)
    block = Block(mixer, mlp(c, activation(c, default="relu2"), c.flag("mlp_bias", False)), norm, norm)
    return model(c, layers=[block] * num_layers(c), norm=norm, names=LLAMA, tied=False)


@family(
    "SeedOssForCausalLM",
    like=[TINY | dict(head_dim=24), TINY | dict(head_dim=16, attention_bias=False, attention_out_bias=True)],
)
def seed_oss(c: Config) -> ModelSpec:
    size, norm = head_size(c, 128), rms_norm(c)
    bias, out_bias = c.flag("attention_bias", True), c.flag("attention_out_bias", False)
    mixer = attention(c, rope=rope(c, size), size=size, qkv_bias=bias, out_bias=out_bias)
    block = Block(mixer, gated_mlp(c, activation(c, default="silu"), c.flag("mlp_bias", False)), norm, norm)
    return model(c, layers=[block] * num_layers(c), norm=norm, names=LLAMA, tied=False)
