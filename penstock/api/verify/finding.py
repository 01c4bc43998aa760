"""One comparison of a part with its reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """The error of a part against its reference, at most, and its limit."""

    part: str  # "op rms_norm", "layer 3", "prompt 2"
    test: str
    error: float
    limit: float
    count: int = 1  # of comparisons
    detail: str = ""

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit  # a NaN is wrong


def relative_error(got: Tensor, wanted: Tensor, scale: Tensor | None = None) -> float:
    """Return the norm of the difference over that of `scale`, the wanted values by default; infinite unless finite."""
    difference = (got.double() - wanted.double()).norm().item()
    base = (wanted if scale is None else scale).double().norm().item()
    error = difference / max(base, 1e-30)
    return error if math.isfinite(error) else math.inf


def has_same_bits(a: Tensor, b: Tensor) -> bool:
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(words), b.contiguous().view(words))
    )
