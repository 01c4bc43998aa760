"""Hugging Face transformers as the oracle: tiny models with random weights, saved as their checkpoints are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


SAME_AS = {"MiMoForCausalLM": "Qwen2ForCausalLM"}  # without the layer that drafts


def find_class(architecture: str) -> Any:
    return getattr(transformers, SAME_AS.get(architecture, architecture))


def make(architecture: str, like: Mapping[str, Any], seed: int = 0, spread: float = 0.15) -> Any:
    """A model of the class with every parameter random: matrices wide enough that logits differ, norms about 1."""
    model_class = find_class(architecture)
    config = model_class.config_class(**like)
    # Only the eager path soft-caps attention scores; eager Falcon adds ALiBi twice.
    path = "sdpa" if model_class._supports_sdpa and not like.get("attn_logit_softcapping") else "eager"
    model = model_class._from_config(config, attn_implementation=path).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = spread * noise
        else:
            parameter.data = (0.0 if name.endswith("bias") else 1.0) + 0.2 * noise
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


CORRECTION = "e_score_correction_bias"  # of routers, whose models hold it as a buffer


def count_values(model: Any) -> int:
    """Count the model's parameters, and the buffers that are parameters here."""
    buffers = (buffer for name, buffer in model.named_buffers() if name.endswith(CORRECTION))
    return sum(values.numel() for values in (*model.parameters(), *buffers))


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def resolve_rope(model: Any, max_model_len: int) -> None:
    """Hold a rope that varies with the length at what it is for `max_model_len`."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in ("dynamic", "longrope"):
            frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](module.config, seq_len=max_model_len)
            module.register_buffer("inv_freq", frequencies, persistent=False)
            module.rope_type = "default"


@torch.no_grad()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[L, V] of one sequence, in one pass without a cache."""
    found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return found
