"""CPU bodies of the ops that compute or copy element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.runtime.library import Kernel, as_integers, as_rows, check_float32, empty_like
from penstock.ops.elementwise import (
    ACTIVATIONS,
    SWIGLU_OAI,
    activation,
    add,
    blank_rows,
    gated_activation,
    gather,
    local_ids,
    scale,
    softcap,
    take_columns,
)

_add_kernel = Kernel("add", "pnpnnnfp")
_scale_kernel = Kernel("scale", "pnfp")
_softcap_kernel = Kernel("softcap", "pnfp")
_gather_kernel = Kernel("gather", "pnpnnnp")
_take_columns_kernel = Kernel("take_columns", "pnnnpnp")
_local_ids_kernel = Kernel("local_ids", "pinnnip")
_blank_rows_kernel = Kernel("blank_rows", "pnpinnp")
_activation_kernel = Kernel("activation", "pnniip")
_NUMBERS = {kind: number for number, kind in enumerate([*ACTIVATIONS, SWIGLU_OAI])}


@add.impl("cpu", exact=True)
def _add(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    x = as_rows("x", x)
    y = check_float32("y", y).contiguous() if y.dim() == 1 else as_rows("y", y)
    if x.dim() != 2 or y.shape not in (x.shape, x.shape[1:]):
        raise ValueError(f"y {tuple(y.shape)} cannot be added to x {tuple(x.shape)}: give [T, C] and [T, C] or [C]")
    out = empty_like(x)
    _add_kernel(
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


def _map(kernel: Kernel, x: Tensor, number: float) -> Tensor:
    x = check_float32("x", x).contiguous()
    out = empty_like(x)
    kernel(x.data_ptr(), x.numel(), number, out.data_ptr())
    return out


@scale.impl("cpu", exact=True)
def _scale(x: Tensor, factor: float) -> Tensor:
    return _map(_scale_kernel, x, factor)


@softcap.impl("cpu", exact=True)
def _softcap(x: Tensor, cap: float) -> Tensor:
    return _map(_softcap_kernel, x, cap)


@gather.impl("cpu", exact=True)
def _gather(at: Tensor, x: Tensor) -> Tensor:
    at, x = as_integers(at, torch.int64), as_rows("x", x)
    out = torch.empty(at.shape[0], x.shape[1])
    _gather_kernel(at.data_ptr(), at.shape[0], x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], out.data_ptr())
    return out


@take_columns.impl("cpu", exact=True)
def _take_columns(x: Tensor, order: Tensor) -> Tensor:
    x, order = as_rows("x", x), as_integers(order, torch.int64)
    out = torch.empty(x.shape[0], order.shape[0])
    _take_columns_kernel(
        x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], order.data_ptr(), order.shape[0], out.data_ptr()
    )
    return out


@local_ids.impl("cpu", exact=True)
def _local_ids(ids: Tensor, first: int, count: int, clamps: bool = False) -> Tensor:
    ids, is_wide = _as_ids(ids)
    out = empty_like(ids)
    _local_ids_kernel(ids.data_ptr(), is_wide, ids.numel(), first, count, clamps, out.data_ptr())
    return out


@blank_rows.impl("cpu", exact=True)
def _blank_rows(x: Tensor, ids: Tensor) -> Tensor:
    x, (ids, is_wide) = as_rows("x", x), _as_ids(ids)
    if ids.shape != x.shape[:1]:
        raise ValueError(f"{tuple(ids.shape)} ids for the rows of x {tuple(x.shape)}")
    out = torch.empty(x.shape)
    _blank_rows_kernel(x.data_ptr(), x.stride(0), ids.data_ptr(), is_wide, *x.shape, out.data_ptr())
    return out


def _as_ids(ids: Tensor) -> tuple[Tensor, bool]:
    """Return contiguous ids of 64 or 32 bits, and whether they have 64."""
    is_wide = ids.dtype is not torch.int32
    return as_integers(ids, torch.int64 if is_wide else torch.int32), is_wide


def activation_number(kind: str, gated: bool) -> int:
    """Give the number of an activation as in `with_activation` of activations.h."""
    if kind not in _NUMBERS or (kind == SWIGLU_OAI and not gated):
        raise ValueError(f"activation kind={kind!r} is not known: use one of {', '.join(ACTIVATIONS)}")
    return _NUMBERS[kind]


def _activate(x: Tensor, kind: str, gated: bool) -> Tensor:
    number = activation_number(kind, gated)
    x = check_float32("x", x).contiguous()
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2) if gated else empty_like(x)
    width = out.shape[-1]
    _activation_kernel(x.data_ptr(), out.numel() // max(width, 1), width, number, gated, out.data_ptr())
    return out


@activation.impl("cpu", exact=True)
def _activation(x: Tensor, kind: str) -> Tensor:
    return _activate(x, kind, gated=False)


@gated_activation.impl("cpu", exact=True)
def _gated_activation(x: Tensor, kind: str) -> Tensor:
    return _activate(x, kind, gated=True)
