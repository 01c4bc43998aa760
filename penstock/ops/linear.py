"""A matrix product with a weight held as panels of 16 outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op

PANEL = 16                             # outputs side by side: one SIMD lane owns one output


def pack_panels(weight: Tensor) -> Tensor:
    """[O, C] → [ceil(O/16), C, 16], padded with zeros."""
    num_out, width = weight.shape
    if num_out % PANEL:
        weight = torch.cat([weight, weight.new_zeros(-num_out % PANEL, width)])
    return weight.reshape(-1, PANEL, width).transpose(1, 2).contiguous()


def unpack_panels(panels: Tensor, num_out: int) -> Tensor:
    """[ceil(O/16), C, 16] → [O, C]."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:num_out]


def _examples() -> Iterator[Example]:
    shapes = [(0, 8, 16), (1, 576, 192), (1, 31, 1), (2, 64, 33), (5, 17, 48), (7, 1, 16), (13, 100, 130),
              (64, 48, 64), (129, 33, 49), (50, 576, 200), (70, 4096, 40)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed, (num_rows, width, num_out) in enumerate(shapes):
            weight = normal(seed, num_out, width, scale=width**-0.5, dtype=dtype)
            yield {"x": normal(seed + 100, num_rows, width), "panels": pack_panels(weight), "num_out": num_out,
                   "bias": normal(seed + 200, num_out) if seed % 2 else None}


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}, examples=_examples)
def linear(x: Tensor, panels: Tensor, num_out: int, bias: Tensor | None = None) -> Tensor:
    """x[T, C] · weightᵀ + bias → [T, O]; sums in float32 over C in order, the bias added last."""
    y = x.float() @ unpack_panels(panels, num_out).float().T
    return (y if bias is None else y + bias).to(x.dtype)
