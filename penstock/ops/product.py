"""A matrix product with a row-major weight, and what stands before and after it in a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.activation import finished
from penstock.ops.example import normal
from penstock.ops.registry import Example, op, takes_exact
from penstock.ops.rms_norm import rms_norm
from penstock.ops.rows import EachRow

DEFERRED_VALUES = 1 << 18  # beyond, reading the rows once more takes as long as norming them
FEW_ROWS = 32
FEW_OUTPUTS = range(4096, 8192)  # with fewer programs or more of them the library is faster


def _examples() -> Iterator[Example]:
    shapes = [
        (1, 576, 192),
        (1, 31, 6),
        (1, 2048, 40),
        (2, 64, 34),
        (5, 17, 48),
        (1, 1, 16),
        (40, 128, 64),
        (1, 5000, 8),
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed, (num_rows, width, num_out) in enumerate(shapes):
            gated = seed % 2 == 0
            size = num_out // 2 if gated else num_out
            yield {
                "x": normal(seed + 100, num_rows, width, dtype=dtype),
                "weight": normal(seed, num_out, width, scale=width**-0.5, dtype=dtype),
                "bias": normal(seed + 200, num_out) if seed % 3 == 1 else None,
                "residual": normal(seed + 300, num_rows, size, dtype=dtype) if seed % 3 != 2 else None,
                "activation": {0: "silu", 2: "relu2", 4: "gelu_tanh"}.get(seed % 5),
                "gated": gated,
                "norm": normal(seed + 400, width) if seed % 4 < 2 else None,
                "eps": 1e-5 if seed % 4 < 3 else 0.0,
            }


def is_few(x: Tensor, weight: Tensor, norm: Tensor | None) -> bool:
    """Whether rows and outputs are so few that a kernel which also norms, adds and activates is faster than the
    library's."""
    return (
        1 < x.shape[0] <= FEW_ROWS
        and weight.shape[0] in FEW_OUTPUTS
        and norm is None
        and x.itemsize == 2
        and weight.dtype == x.dtype
        and x.stride(1) == 1
        and weight.is_contiguous()
        and not takes_exact()
    )


def defers(x: Tensor, norm: Tensor | None, bias: Tensor | None, eps: float) -> bool:
    """Whether the norm of a few rows is left to whoever reads the product: it multiplies each row by one number. The
    sums are larger by as much, which bfloat16 can hold."""
    return (
        eps > 0
        and norm is None
        and bias is None
        and x.dtype == torch.bfloat16
        and x.shape[0] > 1
        and x.numel() <= DEFERRED_VALUES
        and x.stride(1) == 1
        and not takes_exact()
    )


@op(
    tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3},
    examples=_examples,
    rows=EachRow("x", "residual"),
)
def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """residual + act(y · weightᵀ + bias) → [T, O] for x[T, C] and weight[O, C].

    y is x, or `rms_norm` of it where eps is over 0, with weights norm[C] or with none. Gated, the first half of the
    outputs is the gate of the second: act(gate) · up → [T, O/2]. The result may be written where the residual lies.
    """
    y = x.float()
    if eps > 0:
        y = rms_norm.reference(y, y.new_ones(y.shape[1]) if norm is None else norm, eps)
    return finished(y @ weight.float().T, bias, residual, activation, gated).to(x.dtype)
