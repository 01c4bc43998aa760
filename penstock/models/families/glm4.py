"""GLM-4: RoPE over half of each head, in pairs of neighbours; the later models norm what attention and MLP give."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import activation, attention, gated_mlp, head_size, model, num_layers, rms_norm
from penstock.models.layer import Attention
from penstock.models.names import LLAMA, MERGED, Names
from penstock.models.spec import AnyBlock, Block, ModelSpec, OutputNormBlock, family

SMALL = TINY | dict(head_dim=16, pad_token_id=0)
UNBIASED = dict(head_dim=24, attention_bias=False, partial_rotary_factor=1.0, tie_word_embeddings=True)
EPS = 1.5625e-7


def glm_attention(c: Config) -> Attention:
    size = head_size(c, 128)
    turn = replace(rope(c, size, fraction=0.5), interleaved=True)
    return attention(c, rope=turn, size=size, qkv_bias=c.flag("attention_bias", True))


def build_glm(c: Config, block: AnyBlock, names: Names) -> ModelSpec:
    layers = [block] * num_layers(c)
    return model(c, layers=layers, norm=rms_norm(c, eps=EPS), names=LLAMA | MERGED | names, tied=False)


@family("GlmForCausalLM", like=[SMALL, SMALL | UNBIASED])
def glm(c: Config) -> ModelSpec:
    norm, feed = rms_norm(c, eps=EPS), gated_mlp(c, activation(c, default="silu"))
    return build_glm(c, Block(glm_attention(c), feed, mixer_norm=norm, ffn_norm=norm), Names())


@family("Glm4ForCausalLM", like=[SMALL, SMALL | UNBIASED])
def glm4(c: Config) -> ModelSpec:
    norm, feed = rms_norm(c, eps=EPS), gated_mlp(c, activation(c, default="silu"))
    block = OutputNormBlock(glm_attention(c), feed, norm, norm, norm, norm)
    after = {"post_self_attn_layernorm": "attention_out_norm", "post_mlp_layernorm": "mlp_out_norm"}
    return build_glm(c, block, Names(layer=after))
