from __future__ import annotations

from torch import Tensor

from penstock.ops.add import add
from penstock.ops.cpu.library import Kernel, empty_like, float32, rows

_kernel = Kernel("add", "pnpnnnfp")


@add.impl("cpu", exact=True)
def _add(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    x = rows("x", x)
    y = float32("y", y).contiguous() if y.dim() == 1 else rows("y", y)
    if x.dim() != 2 or y.shape not in (x.shape, x.shape[1:]):
        raise ValueError(f"y {tuple(y.shape)} cannot be added to x {tuple(x.shape)}: give [T, C] and [T, C] or [C]")
    out = empty_like(x)
    _kernel(
        x.data_ptr(),
        x.stride(0),
        y.data_ptr(),
        0 if y.dim() == 1 else y.stride(0),
        x.shape[0],
        x.shape[1],
        scale,
        out.data_ptr(),
    )
    return out
