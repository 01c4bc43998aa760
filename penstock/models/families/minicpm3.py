"""MiniCPM3 and Youtu: latent attention in dense models."""

from __future__ import annotations

from penstock.models.config import Config
from penstock.models.families.deepseek import TINY, YARN
from penstock.models.families.parts import (
    activation,
    embedding,
    gated_mlp,
    latent_attention,
    model,
    num_heads,
    num_layers,
    rms_norm,
    width,
)
from penstock.models.names import LATENT
from penstock.models.spec import Block, ModelSpec, ScaledBlock, family


@family(
    "MiniCPM3ForCausalLM",
    like=[
        TINY | dict(q_lora_rank=24, scale_emb=3, scale_depth=1.1, dim_model_base=48),
        TINY
        | dict(num_attention_heads=5, num_key_value_heads=5, hidden_size=80, v_head_dim=None)
        | dict(num_hidden_layers=3, attention_bias=True, scale_depth=None, dim_model_base=None)
        | dict(tie_word_embeddings=False),
    ],
)
def minicpm3(c: Config) -> ModelSpec:
    num, ranks = num_layers(c), (768, 256)
    value_size = max(1, width(c) // num_heads(c))
    block = ScaledBlock(
        latent_attention(c, ranks=ranks, sizes=(64, 32), value_size=value_size, interleaved=False),
        gated_mlp(c, activation(c, default="silu"), c.flag("mlp_bias", False)),
        mixer_norm=rms_norm(c, eps=1e-5),
        ffn_norm=rms_norm(c, eps=1e-5),
        scale=_number(c, "scale_depth", 1.4, num**0.5) / num**0.5,
    )
    return model(
        c,
        layers=[block] * num,
        norm=rms_norm(c, eps=1e-5),
        names=LATENT,
        tied=True,
        embed=embedding(c, scale=c.number("scale_emb", default=12.0, above=0.0)),
        divisor=width(c) / _number(c, "dim_model_base", 256.0, width(c)),
    )


def _number(c: Config, name: str, default: float, null: float) -> float:
    """Read a number above 0; `null` where the config says null, `default` where it says nothing."""
    return c.number(name, default=null if name in c.values else default, above=0.0)


@family(
    "YoutuForCausalLM",
    like=[TINY | dict(q_lora_rank=24), TINY | dict(rope_interleave=False, attention_bias=True, rope_parameters=YARN)],
)
def youtu(c: Config) -> ModelSpec:
    c.ignore("embedding_initializer_range")
    interleaved = c.flag("rope_interleave", True)
    block = Block(
        latent_attention(c, ranks=(1536, 512), sizes=(128, 64), value_size=128, interleaved=interleaved),
        gated_mlp(c, activation(c, default="silu")),
        mixer_norm=rms_norm(c),
        ffn_norm=rms_norm(c),
    )
    return model(c, layers=[block] * num_layers(c), norm=rms_norm(c), names=LATENT, tied=True)
