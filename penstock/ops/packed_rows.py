"""Rows of a packed matrix, so that a tied output head shares its storage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import integers
from penstock.ops.packed import FORMATS, PackedWeight
from penstock.ops.packed_linear import packed_example
from penstock.ops.registry import Example, op


def _examples() -> Iterator[Example]:
    for seed, format in enumerate(FORMATS.values()):
        num_rows, width = 50 + seed, 256 if format.supers else 96
        yield {"ids": integers(seed, num_rows, 5 * seed), "weight": packed_example(seed, format, num_rows, width)}


@op(tolerance={torch.float32: 0.0}, examples=_examples)
def packed_rows(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows ids[T] of the packed matrix → [T, C] float32."""
    return weight.unpacked()[ids]
