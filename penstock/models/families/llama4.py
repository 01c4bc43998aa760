"""Llama 4 (text): experts that get weighed tokens beside a shared one; attention in chunks, or to everything without
positions."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS, Config, rope
from penstock.models.experts import WeighedInputExpertsSpec
from penstock.models.families.llama import LLAMA3, TINY
from penstock.models.families.parts import activation, attention, experts, head_size, model, num_layers, rms_norm, width
from penstock.models.layer import Attention, GatedMlp, TemperedAttentionSpec, UnitNorm
from penstock.models.names import EXPERTS, LLAMA, Names, Stored
from penstock.models.spec import Block, ModelSpec, family

LLAMA4 = Names(
    layer={
        "feed_forward.router": "mlp.router",
        "feed_forward.experts.gate_up_proj": Stored("mlp.experts.gate_up", "stack_transposed"),
        "feed_forward.experts.down_proj": Stored("mlp.experts.down", "stack_transposed"),
        **{
            f"feed_forward.{theirs}{half}_proj": f"mlp.{ours}{half}"
            for half in ("gate", "up", "down")
            for theirs, ours in (("", ""), ("shared_expert.", "shared."), ("experts.*.", "experts.*."))
        },
        **{
            f"feed_forward.experts.{half}_exps": Stored(f"mlp.experts.*.{half}", "stacked")
            for half in ("gate", "up", "down")
        },
    }
)
MOE = TINY | dict(intermediate_size=32, intermediate_size_mlp=48, num_local_experts=4, head_dim=16, num_hidden_layers=4)
KINDS = ("chunked_attention", "full_attention")


def _attentions(c: Config) -> list[Attention]:
    """Read each layer's attention: with positions or without, over a chunk or over everything."""
    size, count, bias = head_size(c), num_layers(c), c.flag("attention_bias", False)
    turn = replace(rope(c, size, theta=500000.0), interleaved=True)
    if turn.attention_factor != 1.0:
        c.refuse("rope_scaling", "changes the length of queries, which are normed afterwards: that is not supported")
    interval = c.count("no_rope_layer_interval", default=4, most=MAX_LAYERS)
    turned = c.switches("no_rope_layers", count) or [(i + 1) % interval != 0 for i in range(count)]
    kinds = c.choices("layer_types", KINDS, count) or [KINDS[not turns] for turns in turned]
    chunk = c.count("attention_chunk_size", default=8192, most=MAX_POSITIONS)
    norm = UnitNorm(size, rms_norm(c, eps=1e-5).eps) if c.flag("use_qk_norm", True) else None
    tempers = c.flag("attn_temperature_tuning", True)
    strength = c.number("attn_scale", default=0.1)
    stretch = c.count("floor_scale", default=8192, most=MAX_POSITIONS)
    plain = attention(c, size=size, qkv_bias=bias, out_bias=bias)
    made = []
    for turns, kind in zip(turned, kinds):
        one = replace(plain, window=-chunk if kind == KINDS[0] else 0)
        if turns:
            made.append(replace(one, rope=turn, q_norm=norm, k_norm=norm))
        else:
            made.append(TemperedAttentionSpec(**vars(one), strength=strength, stretch=stretch) if tempers else one)
    return made


@family(
    "Llama4ForCausalLM",
    like=[
        MOE | dict(attention_chunk_size=9, floor_scale=5, attn_scale=0.3),
        MOE
        | dict(attention_chunk_size=16, interleave_moe_layer_step=2, num_experts_per_tok=2, use_qk_norm=False)
        | dict(attn_temperature_tuning=False, rope_parameters=LLAMA3, attention_bias=True, no_rope_layer_interval=2),
        MOE | dict(attention_chunk_size=70, moe_layers=[1], no_rope_layers=[1, 0, 1, 1], num_experts_per_tok=4),
    ],
    cpu_only="kernels for attention in chunks, which do not exist yet: set device=cpu",
)
def llama4(c: Config) -> ModelSpec:
    c.ignore("router_jitter_noise", "for_llm_compressor")  # of training; of how the model was made
    kind, count = activation(c, default="silu"), num_layers(c)
    shared = c.count("intermediate_size", default=8192, most=MAX_HIDDEN)
    mixture = WeighedInputExpertsSpec(**vars(experts(c, count=16, chosen=1, shared=shared, score="sigmoid")))
    step = c.count("interleave_moe_layer_step", default=1, most=MAX_LAYERS)
    named = c.values.get("moe_layers") is not None
    sparse = c.places("moe_layers", count) if named else set(range(step - 1, count, step))
    feed = GatedMlp(width(c), c.count("intermediate_size_mlp", default=16384, most=MAX_HIDDEN), kind)
    norm = rms_norm(c, eps=1e-5)
    layers = [
        Block(one, mixture if i in sparse else feed, mixer_norm=norm, ffn_norm=norm)
        for i, one in enumerate(_attentions(c))
    ]
    return model(c, layers=layers, norm=norm, names=LLAMA | EXPERTS | LLAMA4, tied=False)
