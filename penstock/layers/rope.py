"""Rotary position tables and the frequencies behind them.

Frequencies are computed in float32, operation for operation as the models were trained with; the sines and cosines of
the float32 angles are taken in float64, so that a table's values do not depend on its length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.ops import OpTable

SLAB = 4096  # positions whose angles are held in float64 at a time


def frequencies(size: int, theta: float) -> Tensor:
    """theta^(-2i/size) for i < size/2."""
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def linear_frequencies(size: int, theta: float, factor: float) -> Tensor:
    return frequencies(size, theta) / factor


def llama3_frequencies(
    size: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    plain = frequencies(size, theta)
    waves = 2 * math.pi / plain
    blend = (original / waves - low_freq_factor) / ((high_freq_factor - low_freq_factor) or 1.0)
    mixed = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(waves > original / low_freq_factor, plain / factor, mixed)
    return torch.where(waves < original / high_freq_factor, plain, stretched)


def yarn_frequencies(
    size: int, theta: float, factor: float, original: int, beta_fast: float, beta_slow: float, truncate: bool
) -> Tensor:
    """Dimensions that turn more than beta_fast times over the original length are kept, under beta_slow stretched."""

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    stretched = torch.clamp((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    kept = 1 - stretched
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


def long_frequencies(size: int, theta: float, factors: tuple[float, ...]) -> Tensor:
    powers = theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)


class RopeTable:
    """cos and sin [M, R/2] of every position, shared by the layers that turn alike."""

    def __init__(
        self,
        ops: OpTable,
        frequencies: Tensor,
        length: int,
        factor: float = 1.0,
        device: torch.device | None = None,
        interleaved: bool = False,
    ) -> None:
        self.ops, self.interleaved = ops, interleaved
        shape = (length, frequencies.shape[0])
        frequencies = frequencies.to(device)
        self.cos, self.sin = torch.empty(shape, device=device), torch.empty(shape, device=device)
        for start in range(0, length, SLAB):
            positions = torch.arange(start, min(length, start + SLAB), dtype=torch.float32, device=device)
            angles = (positions[:, None] * frequencies).double()
            rows = slice(start, start + SLAB)
            self.cos[rows] = angles.cos().float() * factor
            self.sin[rows] = angles.sin().float() * factor

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.ops.rope(x, positions, self.cos, self.sin, self.interleaved)
