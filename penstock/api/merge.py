"""Merge adapters into a model, by names and folders as users give them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.api.model_files import find_model
from penstock.errors import InvalidModel, InvalidRequest
from penstock.models.files import open_checkpoint
from penstock.models.files.safetensors import SafetensorsCheckpoint
from penstock.models.lora import ScaledAdapter, merge
from penstock.models.spec import spec_from_config
from penstock.types.lora import check_scale


def merge_adapters(model: str, adapters: Sequence[str], scales: Sequence[float], out: str) -> int:
    """Write `model` with the adapters in its weights to the folder `out`; returns how many tensors changed."""
    if len(scales) not in (0, len(adapters)):
        raise InvalidRequest(f"{len(adapters)} adapters came with {len(scales)} scales: give one --scale for each")
    for scale in scales:
        check_scale(scale)
    base = open_checkpoint(find_model(model, None, progress=sys.stderr.isatty()))
    try:
        if not isinstance(base, SafetensorsCheckpoint):
            raise InvalidModel(
                f"{model} is a GGUF file: merge into the safetensors folder it was made from, then convert the result"
            )
        chosen = [
            ScaledAdapter(Path(folder), scale) for folder, scale in zip(adapters, scales or [1.0] * len(adapters))
        ]
        return merge(base, spec_from_config(base.config), chosen, Path(out))
    finally:
        base.close()
