"""Round weights to integers or FP8 with a scale per output or per group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.quantize.gguf.fits import divide

MAX_FP8 = 448.0
SHRINKS = tuple(1.0 - 0.05 * i for i in range(11))  # shares of a group's range that are tried


@dataclass
class Grid:
    """Values that each group of a matrix may take: scale · (code − zero). `zero` is absent where it is 0."""

    bits: int
    scale: Tensor  # [O, G] float32, as its dtype in the file holds it
    zero: Tensor | None = None  # [O, G] whole numbers
    is_float: bool = False

    @property
    def limits(self) -> tuple[int, int]:
        return -(1 << self.bits - 1), (1 << self.bits - 1) - 1

    def codes(self, weight: Tensor) -> Tensor:
        """Round weight[O, C] → codes [O, C], whole numbers or FP8 values in float32."""
        parts = weight.reshape(len(weight), self.scale.shape[1], -1)
        scaled = divide(parts, self.scale[..., None])
        if self.is_float:
            rounded = scaled.clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn).float()
        else:
            zero = 0.0 if self.zero is None else self.zero[..., None]
            rounded = (scaled + zero).round().clamp(*self.limits)
        return rounded.view_as(weight)

    def widen(self, codes: Tensor) -> Tensor:
        parts = codes.reshape(len(codes), self.scale.shape[1], -1)
        zero = 0.0 if self.zero is None else self.zero[..., None]
        return (self.scale[..., None] * (parts - zero)).view_as(codes)

    def round(self, weight: Tensor) -> Tensor:
        return self.widen(self.codes(weight))

    def column(self, group: int) -> Grid:
        """The grid of one group alone."""
        zero = None if self.zero is None else self.zero[:, group : group + 1]
        return Grid(self.bits, self.scale[:, group : group + 1], zero, self.is_float)

    def rows(self, part: slice | Tensor) -> Grid:
        return Grid(self.bits, self.scale[part], None if self.zero is None else self.zero[part], self.is_float)

    @staticmethod
    def join(parts: Sequence[Grid]) -> Grid:
        """Put the grids of matrices below each other."""
        zeros = [part.zero for part in parts if part.zero is not None]
        scale, zero = torch.cat([part.scale for part in parts]), torch.cat(zeros) if zeros else None
        return Grid(parts[0].bits, scale, zero, parts[0].is_float)


def fit_grid(weight: Tensor, bits: int, group: int, dtype: torch.dtype, is_float: bool = False) -> Grid:
    """Span each group's values: the largest magnitude is 7.5 of int4's steps, 127.5 of int8's, 448 in FP8."""
    parts = weight.reshape(len(weight), -1, group or weight.shape[1])
    most = MAX_FP8 if is_float else ((1 << bits) - 1) / 2
    return Grid(bits, _store(parts.abs().amax(2) / most, dtype), is_float=is_float)


def search_grid(weight: Tensor, bits: int, group: int, dtype: torch.dtype, importance: Tensor) -> Grid:
    """Shrink each group's range to where the error, weighted by importance[C], is least."""
    whole = fit_grid(weight, bits, group, dtype)
    shape = (len(weight), whole.scale.shape[1], -1)
    best, least = whole.scale, torch.full_like(whole.scale, torch.inf)
    for share in SHRINKS:
        grid = Grid(bits, _store(whole.scale * share, dtype))
        error = ((grid.round(weight) - weight).square() * importance).reshape(shape).sum(2)
        best = torch.where(error < least, grid.scale, best)
        least = torch.minimum(error, least)
    return Grid(bits, best)


def _store(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales as the file holds them."""
    return scale.to(dtype).float()


def store_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _store(scale, dtype)


def round_tokens(x: Tensor, kind: str) -> Tensor:
    """Round each row of x[T, C] to 8 bits with a scale of its own, as kernels for such models do."""
    if kind == "fp8":
        scale = (x.abs().amax(1, keepdim=True) / MAX_FP8).clamp(min=1e-12)
        return (x / scale).to(torch.float8_e4m3fn).float() * scale
    scale = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return (x / scale).round().clamp(-128, 127) * scale
