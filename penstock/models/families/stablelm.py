"""StableLM: Llama with layer norms and RoPE over a part of each head; some have attention and MLP side by side."""

from __future__ import annotations

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import activation, attention, gated_mlp, head_size, layer_norm, model, num_layers
from penstock.models.names import LLAMA
from penstock.models.spec import AnyBlock, Block, ModelSpec, ParallelBlock, family


@family(
    "StableLmForCausalLM",
    like=[
        TINY | dict(partial_rotary_factor=0.25),
        TINY | dict(partial_rotary_factor=0.5, use_qkv_bias=True, use_parallel_residual=True, tie_word_embeddings=True),
    ],
)
def stablelm(c: Config) -> ModelSpec:
    c.only("qk_layernorm", False)
    norm, feed = layer_norm(c, "layer_norm_eps", "norm_eps"), gated_mlp(c, activation(c, default="silu"))
    turn = rope(c, head_size(c), fraction=0.25, fraction_keys=["partial_rotary_factor", "rope_pct"])
    mixer = attention(c, rope=turn, qkv_bias=c.flag("use_qkv_bias", False))
    block: AnyBlock = Block(mixer, feed, mixer_norm=norm, ffn_norm=norm)
    if c.flag("use_parallel_residual", False):
        block = ParallelBlock(mixer, feed, mixer_norm=norm)
    return model(c, layers=[block] * num_layers(c), norm=norm, names=LLAMA, tied=False)
