"""Rows of one or two outer dimensions, as the norms' kernels take them."""

from __future__ import annotations

from torch import Tensor

from penstock.ops.cpu.library import float32

Layout = tuple[int, int, int, int, int]  # outer count, outer stride, inner count, inner stride, width


def row_layout(x: Tensor) -> tuple[Tensor, Layout]:
    """The tensor to read (a copy if its layout is unusual) and how its rows lie."""
    float32("x", x)
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
    if float32("residual", residual).shape != x.shape:
        raise ValueError(f"residual has the shape {tuple(residual.shape)}, not {tuple(x.shape)}")
    return residual.contiguous()


def check_parameter(name: str, parameter: Tensor, width: int) -> Tensor:
    if float32(name, parameter).shape != (width,):
        raise ValueError(f"{name} has the shape {tuple(parameter.shape)}, not ({width},)")
    return parameter.contiguous()
