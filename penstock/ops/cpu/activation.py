from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.activation import KINDS, activation, gated_activation
from penstock.ops.cpu.library import Kernel, empty_like, float32

_kernel = Kernel("activation", "pnniip")
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


def _run(x: Tensor, kind: str, gated: bool) -> Tensor:
    if kind not in _NUMBERS:
        raise ValueError(f"activation kind={kind!r} is not known: use one of {', '.join(KINDS)}")
    x = float32("x", x).contiguous()
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2) if gated else empty_like(x)
    width = out.shape[-1]
    _kernel(x.data_ptr(), out.numel() // max(width, 1), width, _NUMBERS[kind], gated, out.data_ptr())
    return out


@activation.impl("cpu", exact=True)
def _activation(x: Tensor, kind: str) -> Tensor:
    return _run(x, kind, gated=False)


@gated_activation.impl("cpu", exact=True)
def _gated_activation(x: Tensor, kind: str) -> Tensor:
    return _run(x, kind, gated=True)
