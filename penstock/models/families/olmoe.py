"""OLMoE: one norm over all queries and one over all keys, and experts whose weights need not sum to one."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import attention, experts, head_size, model, num_layers, rms_norm
from penstock.models.names import EXPERTS, LLAMA, QK_NORM
from penstock.models.spec import Block, ModelSpec, family


@family(
    "OlmoeForCausalLM",
    like=[
        TINY | dict(num_experts=8, num_experts_per_tok=3),
        TINY | dict(num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True),
    ],
)
def olmoe(c: Config) -> ModelSpec:
    c.only("clip_qkv")
    bias = c.flag("attention_bias", False)
    plain = attention(c, rope=rope(c, head_size(c)), qkv_bias=bias, out_bias=bias)
    queries, keys, _ = plain.rows
    inner = replace(plain, q_norm=rms_norm(c, queries, eps=1e-5), k_norm=rms_norm(c, keys, eps=1e-5))
    norm = rms_norm(c, eps=1e-5)
    mixture = experts(c, count=64, chosen=8, normalizes=c.flag("norm_topk_prob", False))
    block = Block(inner, mixture, mixer_norm=norm, ffn_norm=norm)
    return model(c, layers=[block] * num_layers(c), norm=norm, names=LLAMA | QK_NORM | EXPERTS, tied=False)
