from __future__ import annotations

from torch import Tensor

from penstock.ops.cpu.library import Kernel, empty_like, pointer
from penstock.ops.cpu.norm import check_parameter, check_residual, row_layout
from penstock.ops.rms_norm import rms_norm

_kernel = Kernel("rms_norm", "pnnnnnpfpp")


@rms_norm.impl("cpu", exact=True)
def _rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    read, layout = row_layout(x)
    weight = check_parameter("weight", weight, x.shape[-1])
    residual = check_residual(residual, x)
    out = empty_like(x)
    _kernel(read.data_ptr(), *layout, weight.data_ptr(), eps, pointer(residual), out.data_ptr())
    return out
