"""Load weights as the settings say."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.config import GIB, Resolved
from penstock.models.decoder import Decoder, Encoder
from penstock.models.files import Checkpoint
from penstock.models.load import PACKED
from penstock.models.spec import ModelSpec
from penstock.parallel import Mesh
from penstock.passes.load import load_lowered
from penstock.passes.lora_table import LoraTable

Progress = Callable[[int, int], None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
META = torch.device("meta")


def load_weights(
    checkpoint: Checkpoint | None,
    spec: ModelSpec,
    settings: Resolved,
    device: torch.device,
    progress: Progress | None = None,
    loras: LoraTable | None = None,
    mesh: Mesh | None = None,
) -> Decoder | Encoder:
    """Load a model, or the part of it that the spec describes; `mesh` joins the ranks that share its layers."""
    return load_lowered(
        checkpoint,
        spec,
        dtype=DTYPES.get(settings.dtype),
        quantization=settings.quantization or (PACKED if settings.keeps_packed and device.type != "cpu" else None),
        rounded=settings.activation_dtype == "int8",
        dummy_seed=settings.seed if settings.load_format == "dummy" or device == META else None,
        progress=progress,
        device=device,
        exact=settings.deterministic,
        loras=loras,
        mesh=mesh,
        offload_bytes=int(settings.cpu_offload_gb * GIB),
    )
