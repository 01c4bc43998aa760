"""Mixtral: Mistral with a mixture of experts in place of the MLP."""

from __future__ import annotations

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import attention, experts, head_size, model, num_layers, rms_norm, window
from penstock.models.names import EXPERTS, LLAMA, Names
from penstock.models.spec import Block, ModelSpec, family

MIXTRAL = Names(
    layer={
        "block_sparse_moe.gate": "mlp.router",
        "block_sparse_moe.experts.*.w1": "mlp.experts.*.gate",
        "block_sparse_moe.experts.*.w3": "mlp.experts.*.up",
        "block_sparse_moe.experts.*.w2": "mlp.experts.*.down",
    }
)


@family(
    "MixtralForCausalLM",
    like=[
        TINY | dict(num_local_experts=4, num_experts_per_tok=2),
        TINY | dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=12, head_dim=32, num_hidden_layers=3),
    ],
)
def mixtral(c: Config) -> ModelSpec:
    c.ignore("router_jitter_noise")
    norm = rms_norm(c, eps=1e-5)
    block = Block(
        attention(c, rope=rope(c, head_size(c), theta=1e6), window=window(c)),
        experts(c, normalizes=True),
        mixer_norm=norm,
        ffn_norm=norm,
    )
    names = LLAMA | MIXTRAL | EXPERTS
    return model(c, layers=[block] * num_layers(c), norm=norm, names=names, tied=False)
