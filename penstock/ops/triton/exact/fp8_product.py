from __future__ import annotations

from torch import Tensor

from penstock.ops.fp8_mlp import fp8_mlp
from penstock.ops.fp8_product import fp8_product
from penstock.ops.triton.exact.product import multiply
from penstock.ops.triton.fp8_product import rounded


@fp8_product.impl("cuda", exact=True)
def _body(
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
    """A row alone is rounded to 8-bit floats, too."""
    codes, scales = rounded(x, norm, eps)
    return multiply(codes, weight, bias, residual, activation, gated, x.dtype, scales, scale)


@fp8_mlp.impl("cuda", exact=True)
def _mlp(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    hidden = _body(x, gate_up, gate_up_scale, gate_up_bias, None, activation, True, norm, eps)
    return _body(hidden, down, down_scale, down_bias, residual)
