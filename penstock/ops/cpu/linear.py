from __future__ import annotations

from torch import Tensor

from penstock.ops.cpu.library import TYPES, Kernel, float32, pointer, rows
from penstock.ops.linear import linear

_kernel = Kernel("linear", "pnnnpinpp")


@linear.impl("cpu", exact=True)
def _linear(x: Tensor, panels: Tensor, num_out: int, bias: Tensor | None = None) -> Tensor:
    x, panels = rows("x", x), panels.contiguous()
    num_rows, width = x.shape
    if panels.shape[1] != width or not num_out <= panels.shape[0] * 16:
        raise ValueError(f"panels {tuple(panels.shape)} do not give num_out={num_out} for rows of {width} values")
    if bias is not None and float32("bias", bias).shape != (num_out,):
        raise ValueError(f"bias has the shape {tuple(bias.shape)}, not ({num_out},)")
    out = x.new_empty(num_rows, num_out)
    _kernel(x.data_ptr(), x.stride(0), num_rows, width, panels.data_ptr(), TYPES[panels.dtype], num_out,
            pointer(None if bias is None else bias.contiguous()), out.data_ptr())
    return out
