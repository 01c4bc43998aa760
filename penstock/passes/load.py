"""Load a model ready to run: plain layers, finished block by block."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.models.decoder import CPU, Decoder, Encoder
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.load import load_model
from penstock.models.spec import ModelSpec
from penstock.models.stages import Stage
from penstock.ops import OpTable
from penstock.parallel import Mesh, OneRank
from penstock.passes.adapt import Adapt, LoraTable
from penstock.passes.lower import RULES, Lower, Rule
from penstock.passes.shard import Connect

PLAIN = "PENSTOCK_PLAIN"  # set it to 1 to run layers as they are written, unfused


@dataclass(frozen=True)
class Rank:
    """One of several ranks: its stage of the pipeline, and the mesh of those that share its layers."""

    stage: Stage | None = None
    mesh: Mesh = OneRank()


def load_lowered(
    checkpoint: Checkpoint | None,
    spec: ModelSpec,
    *,
    device: torch.device = CPU,
    exact: bool = False,
    quantization: str | None = None,
    rules: Sequence[Rule] | None = None,
    loras: LoraTable | None = None,
    rank: Rank | None = None,
    **options: Any,
) -> Decoder | Encoder:
    """Load as `load_model` does, fused by `rules` (all of them by default) for the device; with `loras`, its linears
    may have adapters. A spec with `cuts` is one rank's part, of the model that the ranks of `mesh` compute together."""
    if rules is None:
        rules = () if os.environ.get(PLAIN) == "1" else RULES
    ops = OpTable("cpu" if device.type == "cpu" else "cuda", exact)
    lower = Lower(ops, quantization == "fp8", rules)
    rank = rank or Rank()
    first = 0 if rank.stage is None else rank.stage.layers.start
    adapt = None if loras is None else Adapt(lower, loras, first)
    finish = adapt or lower
    connect = None if spec.cuts is None else Connect(spec.cuts, rank.mesh, finish, first)
    model = load_model(
        checkpoint,
        spec,
        device=device,
        quantization=quantization,
        finish=connect or finish,
        stage=rank.stage,
        **options,
    )
    if connect is not None:
        connect.finish(model)
    if adapt is not None:
        adapt.finish(model)
    return model
