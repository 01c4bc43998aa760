"""A matrix product with a weight held as panels of 16 outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.activation import finished
from penstock.ops.example import normal
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow

PANEL = 16  # outputs side by side: one SIMD lane owns one output


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
    shapes = [
        (0, 8, 16),
        (1, 576, 192),
        (1, 31, 1),
        (2, 64, 33),
        (5, 17, 48),
        (7, 1, 16),
        (13, 100, 130),
        (64, 48, 64),
        (129, 33, 49),
        (50, 576, 200),
        (70, 4096, 40),
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed, (num_rows, width, num_out) in enumerate(shapes):
            weight = normal(seed, num_out, width, scale=width**-0.5, dtype=dtype)
            gated = num_out % 32 == 0
            size = num_out // 2 if gated else num_out
            yield {
                "x": normal(seed + 100, num_rows, width),
                "panels": pack_panels(weight),
                "num_out": num_out,
                "bias": normal(seed + 200, num_out) if seed % 2 else None,
                "residual": normal(seed + 300, num_rows, size) if seed % 3 == 1 else None,
                "activation": {0: "silu", 2: "relu"}.get(seed % 5),
                "gated": gated,
            }


@op(
    tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3},
    examples=_examples,
    rows=EachRow("x", "residual"),
)
def linear(
    x: Tensor,
    panels: Tensor,
    num_out: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """residual + act(x[T, C] · weightᵀ + bias) → [T, O]; sums in float32 over C in order.

    Gated, the first half of the weight's outputs is the gate of the second: act(gate) · up → [T, O/2].
    """
    y = x.float() @ unpack_panels(panels, num_out).float().T
    return finished(y, bias, residual, activation, gated).to(x.dtype)
