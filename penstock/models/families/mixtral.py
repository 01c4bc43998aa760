"""Mixtral: Mistral with a mixture of experts in place of the MLP."""

from __future__ import annotations

from penstock.models.config import Config, rope
from penstock.models.experts import Experts
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
)
from penstock.models.names import LLAMA, Names, Stored
from penstock.models.spec import Block, ModelSpec, family

MAX_EXPERTS = 1024

EXPERTS = Names(
    layer={
        "block_sparse_moe.gate": "mlp.router",
        "block_sparse_moe.experts.*.w1": "mlp.experts.*.gate",
        "block_sparse_moe.experts.*.w3": "mlp.experts.*.up",
        "block_sparse_moe.experts.*.w2": "mlp.experts.*.down",
        "mlp.gate": "mlp.router",
        "mlp.experts.gate_up_proj": Stored("mlp.experts.*.gate_up", "stacked"),
        "mlp.experts.down_proj": Stored("mlp.experts.*.down", "stacked"),
    }
)


@family(
    "MixtralForCausalLM",
    like=[
        TINY | dict(num_local_experts=4, num_experts_per_tok=2),
        TINY | dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=12, head_dim=32, num_hidden_layers=3),
    ],
    cpu_only="kernels for experts, which do not exist yet: use a dense model",
)
def mixtral(c: Config) -> ModelSpec:
    c.ignore("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
    num_experts = c.count("num_local_experts", default=8, most=MAX_EXPERTS)
    num_chosen = c.count("num_experts_per_tok", default=2, most=num_experts)
    norm = rms_norm(c, eps=1e-5)
    block = Block(
        attention(c, rope=rope(c, head_size(c), theta=1e6), window=window(c)),
        Experts(gated_mlp(c, activation(c, default="silu")), num_experts, num_chosen),
        mixer_norm=norm,
        ffn_norm=norm,
    )
    return model(c, layers=[block] * num_layers(c), norm=norm, names=LLAMA | EXPERTS, tied=False)
