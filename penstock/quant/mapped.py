"""Weights that do not fit in memory: files without names, whose pages the system drops and reads again as needed."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.quant.dense import Dense
from penstock.quant.packed import Packed
from penstock.quant.scheme import Scheme


def find_folder(path: Path) -> Path:
    """Return the folder of a model, or that of temporary files if it cannot be written to."""
    folder = path if path.is_dir() else path.parent
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


def spill(scheme: Scheme, folder: Path) -> None:
    """Move a weight to a file in `folder`, which is gone once the process ends. It is read there in place, so that what
    is used often stays in the page cache."""
    if isinstance(scheme, Packed):
        scheme.parts = tuple(
            replace(
                part,
                codes=move_to_file(part.codes, folder),
                high=move_to_file(part.high, folder),
                scales=move_to_file(part.scales, folder),
                supers=move_to_file(part.supers, folder),
            )
            for part in scheme.parts
        )
    elif isinstance(scheme, Dense):
        scheme.panels = move_to_file(scheme.panels, folder)


def move_to_file(tensor: Tensor, folder: Path) -> Tensor:
    """Return the same values in a mapped file."""
    if not tensor.nbytes:
        return tensor
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
            pages = mmap.mmap(file.fileno(), tensor.nbytes)  # keeps the file
    except OSError as error:
        raise InvalidModel(
            f"the model does not fit in memory, and {folder} has no room for its experts ({error.strerror}): free "
            "space there, or raise the memory limit"
        ) from None
    mapped = torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
    mapped.copy_(tensor)
    pages.flush()  # clean pages can be dropped without waiting
    return mapped
