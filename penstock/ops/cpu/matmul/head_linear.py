from __future__ import annotations

from torch import Tensor

from penstock.ops.cpu.runtime.library import TYPES, Kernel, check_float32
from penstock.ops.matmul.head_linear import head_linear

_kernel = Kernel("head_linear", "pnnnnnpinp")


@head_linear.impl("cpu", exact=True)
def _head_linear(x: Tensor, panels: Tensor, num_out: int) -> Tensor:
    check_float32("x", x)
    x, panels = x if x.stride(2) == 1 else x.contiguous(), panels.contiguous()
    num_rows, num_heads, width = x.shape
    if panels.shape != (num_heads, -(-num_out // 16), width, 16):
        raise ValueError(f"panels {tuple(panels.shape)} do not give num_out={num_out} for x {tuple(x.shape)}")
    out = x.new_empty(num_rows, num_heads, num_out)
    _kernel(
        x.data_ptr(), x.stride(0), x.stride(1), num_rows, num_heads, width, panels.data_ptr(), TYPES[panels.dtype],
        num_out, out.data_ptr(),
    )  # fmt: skip
    return out
