"""Fit scales and zero points to the weights alone, with outliers set aside (HQQ's half-quadratic splitting)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.quantize.gguf.fits import divide
from penstock.quantize.grids import Grid, store_scale

NORM = 0.7  # of the errors: below 1, a few large ones count little
ROUNDS = 20
BETA, GROWTH = 10.0, 1.05  # weight of the quadratic term in units of the error's inverse scale, and its growth


def fit_half_quadratic(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> Grid:
    """Alternate: codes of the grid, errors shrunk towards zero, scale and zero point by least squares."""
    parts = weight.reshape(len(weight), -1, group or weight.shape[1])
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    top = (1 << bits) - 1
    scale = store_scale((high - low).clamp(min=1e-12) / top, dtype)
    zero = (-(1 << bits - 1) - low / scale).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1)
    grid = Grid(bits, scale, zero)
    best, least = grid, _cost(grid, weight, parts)
    beta = BETA
    for _ in range(ROUNDS):
        codes = grid.codes(weight).view_as(parts)
        error = parts - grid.widen(codes.reshape(weight.shape)).view_as(parts)
        kept = parts - _shrink(error, beta, grid.scale[..., None])
        centred = codes - codes.mean(2, keepdim=True)
        scale = divide((centred * kept).sum(2), centred.square().sum(2))
        scale = store_scale(torch.where(scale > 0, scale, grid.scale), dtype)
        zero = (codes - kept / scale[..., None]).mean(2).round().clamp(*grid.limits)
        grid = Grid(bits, scale, zero)
        cost = _cost(grid, weight, parts)
        is_better = cost < least
        assert best.zero is not None
        best = Grid(bits, torch.where(is_better, scale, best.scale), torch.where(is_better, zero, best.zero))
        least, beta = torch.minimum(cost, least), beta * GROWTH
    return best


def _shrink(error: Tensor, beta: float, unit: Tensor) -> Tensor:
    """Solve for the errors to set aside: the generalized soft threshold of the norm."""
    size = error.abs() / unit
    return error.sign() * (size - (size + 1e-6).pow(NORM - 1) / beta).clamp(min=0) * unit


def _cost(grid: Grid, weight: Tensor, parts: Tensor) -> Tensor:
    return (grid.round(weight) - weight).view_as(parts).abs().pow(NORM).sum(2)
