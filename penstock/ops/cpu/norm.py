"""CPU bodies of the norms."""

from __future__ import annotations

from torch import Tensor

from penstock.ops.cpu.runtime.library import Kernel, check_float32, empty_like, pointer
from penstock.ops.norm import layer_norm, rms_norm

_rms_norm_kernel = Kernel("rms_norm", "pnnnnnpfpp")
_layer_norm_kernel = Kernel("layer_norm", "pnnnnnppfpp")
RowLayout = tuple[int, int, int, int, int]  # outer count, outer stride, inner count, inner stride, width


def row_layout(x: Tensor) -> tuple[Tensor, RowLayout]:
    """Give the tensor to read (a copy if its strides are unusual) and the layout of its rows."""
    check_float32("x", x)
    if x.stride(-1) != 1 and x.shape[-1] != 1 or x.dim() > 3:
        x = x.contiguous().flatten(0, -2)
    if x.dim() == 3:
        return x, (x.shape[0], x.stride(0), x.shape[1], x.stride(1), x.shape[2])
    if x.dim() == 2:
        return x, (x.shape[0], x.stride(0), 1, 0, x.shape[1])
    return x, (1, 0, 1, 0, x.shape[0])


def check_residual(residual: Tensor | None, x: Tensor) -> Tensor | None:
    if residual is None:
        return None
    if check_float32("residual", residual).shape != x.shape:
        raise ValueError(f"residual has the shape {tuple(residual.shape)}, not {tuple(x.shape)}")
    return residual.contiguous()


def check_parameter(name: str, parameter: Tensor, width: int) -> Tensor:
    if check_float32(name, parameter).shape != (width,):
        raise ValueError(f"{name} has the shape {tuple(parameter.shape)}, not ({width},)")
    return parameter.contiguous()


@rms_norm.impl("cpu", exact=True)
def _rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    read, layout = row_layout(x)
    weight = check_parameter("weight", weight, x.shape[-1])
    residual = check_residual(residual, x)
    out = empty_like(x)
    _rms_norm_kernel(read.data_ptr(), *layout, weight.data_ptr(), eps, pointer(residual), out.data_ptr())
    return out


@layer_norm.impl("cpu", exact=True)
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    read, layout = row_layout(x)
    weight = check_parameter("weight", weight, x.shape[-1])
    bias = None if bias is None else check_parameter("bias", bias, x.shape[-1])
    residual = check_residual(residual, x)
    out = empty_like(x)
    _layer_norm_kernel(
        read.data_ptr(), *layout, weight.data_ptr(), pointer(bias), eps, pointer(residual), out.data_ptr()
    )
    return out
