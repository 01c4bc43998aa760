"""Phi-1, 1.5 and 2: attention and MLP side by side after one layer norm, biases everywhere, partial RoPE."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import activation, attention, head_size, layer_norm, mlp, model, num_layers
from penstock.models.names import LLAMA, Names, Stored
from penstock.models.spec import ModelSpec, ParallelBlock, family

PHI = Names(
    model={"final_layernorm": "norm", "lm_head.bias": Stored("head", kind="bias")},
    layer={"self_attn.dense": "attention.out", "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"},
)


@family(
    "PhiForCausalLM",
    like=[TINY | dict(partial_rotary_factor=0.5), TINY | dict(partial_rotary_factor=0.25, hidden_act="gelu")],
)
def phi(c: Config) -> ModelSpec:
    c.only("qk_layernorm", False)
    norm = layer_norm(c, "layer_norm_eps")
    mixer = attention(c, rope=rope(c, head_size(c), fraction=0.5), qkv_bias=True, out_bias=True)
    block = ParallelBlock(mixer, mlp(c, activation(c, default="gelu_new"), bias=True), mixer_norm=norm)
    spec = model(c, layers=[block] * num_layers(c), norm=norm, names=LLAMA | PHI, tied=False)
    assert spec.head is not None
    return replace(spec, head=replace(spec.head, bias=True))
