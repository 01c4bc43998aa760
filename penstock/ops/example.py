"""Seeded inputs for the ops' examples."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def integers(seed: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Uniform in [0, high)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, dtype=dtype)


def permutation(seed: int, size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
