"""Weights that do not fit in memory: files without names, whose pages the system drops and reads again as needed."""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.quant.dense import Dense
from penstock.quant.packed import Packed
from penstock.quant.scheme import Scheme

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
OCTAL = re.compile(r"\\([0-7]{3})")  # of spaces in paths


def find_folder(path: Path) -> tuple[Path | None, str]:
    """Return the folder of a model, or that of temporary files if it cannot be written to, or None if neither is on a
    disk; and why not."""
    tried = []
    for folder in (path if path.is_dir() else path.parent, Path(tempfile.gettempdir())):
        if not os.access(folder, os.W_OK):
            tried.append(f"{folder} cannot be written to")
        elif is_in_memory(folder):
            tried.append(f"{folder} is in memory")
        else:
            return folder, ""
    return None, ", ".join(tried)


def is_in_memory(folder: Path) -> bool:
    """Return True if files in a folder take memory instead of a disk, as far as the system tells."""
    place, found = folder.resolve(), (-1, "")
    try:
        mounts = MOUNTS.read_text().splitlines()
    except OSError:
        return False
    for fields, _, kinds in (line.partition(" - ") for line in mounts):
        parts = fields.split()
        if len(parts) > 4 and kinds:
            point = Path(OCTAL.sub(lambda code: chr(int(code[1], 8)), parts[4]))
            if point in (place, *place.parents) and len(point.parts) >= found[0]:
                found = len(point.parts), kinds.split()[0]  # the last mount at a place hides those before
    return found[1] in IN_MEMORY


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
