"""Load a model ready to run: plain layers, finished block by block."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from penstock.models.decoder import CPU, Decoder, Encoder, Finisher
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.load import load_model
from penstock.models.spec import ModelSpec
from penstock.ops import OpTable
from penstock.parallel import Mesh
from penstock.passes.adapt import Adapt
from penstock.passes.lora_table import LoraTable
from penstock.passes.lower import RULES, Lower
from penstock.passes.shard import Connect

if TYPE_CHECKING:
    from penstock.passes.offload import Offload

PLAIN = "PENSTOCK_PLAIN"  # set it to 1 to run layers as they are written, unfused


def load_lowered(
    checkpoint: Checkpoint | None,
    spec: ModelSpec,
    *,
    device: torch.device = CPU,
    exact: bool = False,
    quantization: str | None = None,
    loras: LoraTable | None = None,
    mesh: Mesh | None = None,
    offload_bytes: int = 0,
    **options: Any,
) -> Decoder | Encoder:
    """Load as `load_model` does, fused for the device; with `loras`, its linears may have adapters. A spec with `cuts`
    is one rank's part, of the model that the ranks of `mesh` compute together. On a GPU, `offload_bytes` of the layers'
    weights stay in host memory."""
    rules = () if os.environ.get(PLAIN) == "1" else RULES
    ops = OpTable("cpu" if device.type == "cpu" else "cuda", exact)
    lower = Lower(ops, quantization == "fp8", rules)
    first = spec.stage.start if spec.stage else 0
    adapt = None if loras is None else Adapt(lower, loras, first)
    finish: Finisher = adapt or lower
    connect = None if spec.cuts is None or mesh is None else Connect(spec.cuts, mesh, finish, first)
    finish = connect or finish
    offload = _make_offload(finish, offload_bytes, spec, device) if offload_bytes else None
    finish = offload or finish
    model = load_model(checkpoint, spec, device=device, quantization=quantization, finish=finish, **options)
    if connect is not None:
        connect.finish(model)
    if adapt is not None:
        adapt.finish(model)
    if offload is not None:
        offload.finish(model)
    return model


def _make_offload(finish: Finisher, num_bytes: int, spec: ModelSpec, device: torch.device) -> Offload:
    from penstock.passes.offload import Offload  # it needs Triton

    return Offload(finish, num_bytes, spec, device)
