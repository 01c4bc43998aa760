from __future__ import annotations

from torch import Tensor

from penstock.ops.cpu.finish import finish
from penstock.ops.cpu.library import TYPES, Kernel, rows
from penstock.ops.linear import linear

_kernel = Kernel("linear", "pnnnpinppniipn")


@linear.impl("cpu", exact=True)
def _linear(
    x: Tensor,
    panels: Tensor,
    num_out: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    x, panels = rows("x", x), panels.contiguous()
    num_rows, width = x.shape
    if panels.shape[1] != width or not num_out <= panels.shape[0] * 16:
        raise ValueError(f"panels {tuple(panels.shape)} do not give num_out={num_out} for rows of {width} values")
    end = finish(x, num_out, bias, residual, activation, gated)
    _kernel(
        x.data_ptr(), x.stride(0), num_rows, width, panels.data_ptr(), TYPES[panels.dtype], *end.arguments(0, num_out)
    )
    return end.out
