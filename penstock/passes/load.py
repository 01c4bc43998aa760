"""Load a model ready to run: plain layers, finished block by block."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from penstock.models.decoder import CPU, Decoder, Encoder
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.load import load_model
from penstock.models.spec import ModelSpec
from penstock.ops import OpTable
from penstock.passes.adapt import Adapt, LoraTable
from penstock.passes.lower import RULES, Lower, Rule

PLAIN = "PENSTOCK_PLAIN"  # set it to 1 to run layers as they are written, unfused


def load_lowered(
    checkpoint: Checkpoint | None,
    spec: ModelSpec,
    *,
    device: torch.device = CPU,
    exact: bool = False,
    quantization: str | None = None,
    rules: Sequence[Rule] | None = None,
    loras: LoraTable | None = None,
    **options: Any,
) -> Decoder | Encoder:
    """Load as `load_model` does, fused by `rules` (all of them by default) for the device; with `loras`, its linears
    may have adapters."""
    if rules is None:
        rules = () if os.environ.get(PLAIN) == "1" else RULES
    ops = OpTable("cpu" if device.type == "cpu" else "cuda", exact)
    lower = Lower(ops, quantization == "fp8", rules)
    adapt = None if loras is None else Adapt(lower, loras, spec.stage.start if spec.stage else 0)
    finish = adapt or lower
    model = load_model(checkpoint, spec, device=device, quantization=quantization, finish=finish, **options)
    if adapt is not None:
        adapt.finish(model)
    return model
