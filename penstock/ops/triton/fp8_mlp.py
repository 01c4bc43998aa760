from __future__ import annotations

from torch import Tensor

from penstock.ops.fp8_mlp import fp8_mlp
from penstock.ops.triton.fp8_product import finish, finish_codes, multiplied, rounded
from penstock.ops.triton.product import one_row


@fp8_mlp.impl("cuda", exact=False)
def _body(
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
    if x.shape[0] == 1 and x.is_contiguous():
        hidden = one_row(x, gate_up, gate_up_bias, None, activation, True, norm, eps, gate_up_scale)
        return one_row(hidden, down, down_bias, residual, None, False, None, 0.0, down_scale)
    codes, scales = rounded(x, norm, eps)
    sums = multiplied(codes, gate_up, x.dtype)
    codes, scales = finish_codes(sums, scales, gate_up_scale, gate_up_bias, activation)
    return finish(multiplied(codes, down, x.dtype), scales, down_scale, down_bias, residual, None, False)
