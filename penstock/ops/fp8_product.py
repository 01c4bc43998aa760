"""A matrix product with a weight of 8-bit floats, one scale per output, and what stands before and after it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.activation import finished
from penstock.ops.product import product
from penstock.ops.registry import Example, op
from penstock.ops.rms_norm import rms_norm
from penstock.ops.rows import EachRow

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 1e-12  # of a row's largest value
MULTIPLE = 16  # the library multiplies 8-bit floats where both sizes are such


def fits(num_out: int, num_in: int) -> bool:
    """Whether a weight of that shape can be of 8-bit floats."""
    return num_out % MULTIPLE == 0 and num_in % MULTIPLE == 0


def _examples() -> Iterator[Example]:
    assert product.examples is not None
    for example in product.examples():
        if example["x"].dtype == torch.bfloat16 and fits(*example["weight"].shape):
            weight, scale = quantized(example.pop("weight").float())
            yield {"x": example.pop("x"), "weight": weight, "scale": scale, **example}


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x as 8-bit floats, and what a code of 1 stands for in each; NaN and infinity make NaN of their row."""
    scale = x.float().abs().amax(-1).clamp(min=LEAST) / LARGEST
    return (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(FP8), scale


@op(tolerance={torch.float32: 5e-2, torch.bfloat16: 1e-1}, examples=_examples, rows=EachRow("x", "residual"))
def fp8_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """As `product`, for weight[O, C] of 8-bit floats times scale[O]. More rows than one are rounded to 8-bit floats,
    too, each with a scale of its own, so that a row gets what it would get alone among others."""
    y = x.float()
    if eps > 0:
        y = rms_norm.reference(y, y.new_ones(y.shape[1]) if norm is None else norm, eps)
    if x.shape[0] > 1:
        codes, scales = quantized(y)
        y = codes.float() * scales[:, None]
    sums = y @ (weight.float() * scale[:, None]).T
    return finished(sums, bias, residual, activation, gated).to(x.dtype)
