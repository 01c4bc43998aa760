"""One small file per family: a config in, a ModelSpec out. No forward code and no loading code."""

from __future__ import annotations

from penstock.models.families import (  # noqa: F401
    bert,
    bloom,
    deepseek,
    falcon,
    gemma,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mamba2,
    minicpm3,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    opt,
    phi3,
    phimoe,
    qwen,
    qwen_moe,
    starcoder2,
)
