from __future__ import annotations

from torch import Tensor

from penstock.ops.cpu.library import Kernel, empty_like, pointer
from penstock.ops.cpu.norm import check_parameter, check_residual, row_layout
from penstock.ops.layer_norm import layer_norm

_kernel = Kernel("layer_norm", "pnnnnnppfpp")


@layer_norm.impl("cpu", exact=True)
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    read, layout = row_layout(x)
    weight = check_parameter("weight", weight, x.shape[-1])
    bias = None if bias is None else check_parameter("bias", bias, x.shape[-1])
    residual = check_residual(residual, x)
    out = empty_like(x)
    _kernel(read.data_ptr(), *layout, weight.data_ptr(), pointer(bias), eps, pointer(residual), out.data_ptr())
    return out
