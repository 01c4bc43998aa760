"""Mamba-2: a stack of selective state spaces, without attention and without MLPs."""

from __future__ import annotations

from penstock.models.config import MAX_HEAD_SIZE, MAX_HEADS, Config
from penstock.models.families.parts import activation, model, num_layers, width
from penstock.models.layer import RmsNorm
from penstock.models.names import Names
from penstock.models.recurrent import Mamba2
from penstock.models.spec import MixerBlock, ModelSpec, family

CONTEXT = 1 << 18  # configs name none, and states have one size whatever the length
MAX_KERNEL = 64

TINY = dict(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_heads=8,
    head_dim=16,
    n_groups=2,
    state_size=16,
    chunk_size=16,
)
NAMES = Names(
    prefixes=("backbone.",),
    stack="layers",
    model={"embeddings": "embedding.tokens", "embedding": "embedding.tokens", "norm_f": "norm", "lm_head": "head.rows"},
    layer={
        "norm": "mixer_norm",
        "mixer.in_proj": "mixer.in",
        "mixer.conv1d": "mixer.conv",
        "mixer.dt_bias": "mixer.dt_bias",
        "mixer.A_log": "mixer.a_log",
        "mixer.D": "mixer.d",
        "mixer.norm": "mixer.norm",
        "mixer.out_proj": "mixer.out",
    },
)


@family(
    "Mamba2ForCausalLM",
    like=[
        TINY,
        TINY
        | dict(
            num_hidden_layers=3,
            num_heads=4,
            head_dim=48,
            expand=3,
            n_groups=1,
            state_size=8,
            conv_kernel=3,
            use_bias=True,
            use_conv_bias=False,
            tie_word_embeddings=True,
        ),
    ],
    cpu_only="kernels for recurrent states, which do not exist yet: use a model with attention",
)
def mamba2(c: Config) -> ModelSpec:
    c.ignore("chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "norm_before_gate", "intermediate_size")
    c.ignore(*(f"time_step_{name}" for name in ("rank", "min", "max", "floor", "scale", "init_scheme")))
    c.only("time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    c.only("rms_norm", True)
    heads = c.count("num_heads", default=128, most=MAX_HEADS)
    size = c.count("head_dim", default=64, most=MAX_HEAD_SIZE)
    if heads * size != c.count("expand", default=2, most=MAX_HEADS) * width(c):
        c.refuse("num_heads", f"and head_dim={size} do not multiply to expand × hidden_size")
    groups = c.count("n_groups", default=8, most=heads)
    if heads % groups:
        c.refuse("n_groups", f"does not divide num_heads={heads}")
    eps = c.number("layer_norm_epsilon", default=1e-5, most=1.0)
    mixer = Mamba2(
        width(c),
        heads,
        size,
        groups,
        c.count("state_size", default=128, most=MAX_HEAD_SIZE),
        c.count("conv_kernel", default=4, least=2, most=MAX_KERNEL),
        activation(c, default="silu"),
        eps,
        c.flag("use_bias", False),
        c.flag("use_conv_bias", True),
    )
    norm = RmsNorm(width(c), eps)
    layers = [MixerBlock(mixer, norm)] * num_layers(c)
    return model(c, layers=layers, norm=norm, names=NAMES, tied=False, positions=CONTEXT)
