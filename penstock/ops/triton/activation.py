from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.activation import KINDS, activation, gated_activation
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import activated, norm_factor
from penstock.ops.triton.sizes import cdiv, norm_block

BLOCK, WIDE_BLOCK = 1024, 2048  # values of a program
WIDE = 8192  # values of a row


@triton.jit
def _activation(
    x,
    out,
    source,
    x_row,
    width,
    source_row,
    source_width,
    eps,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """All that is to be read is asked for before the first of it is used."""
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    ups = y
    if GATED:
        ups = tl.load(x + row * x_row + width + at, mask=inside, other=0.0).to(tl.float32)
    if source is not None:
        factor = norm_factor(source + row * source_row, source_width, eps, NORMED)
        y *= factor
        ups *= factor
    y = activated(y, KIND)
    if GATED:
        y *= ups
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=inside)


def activate(x: Tensor, kind: str, gated: bool, source: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """With `source`, x are sums over rows of it that were not normed before: what the norm would have multiplied them
    by is made up for."""
    if kind not in KINDS:
        raise ValueError(f"activation kind={kind!r} is not known: use one of {', '.join(KINDS)}")
    width = x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if out.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        block = WIDE_BLOCK if width >= WIDE else BLOCK
        row, size = (0, 0) if source is None else (source.stride(0), source.shape[1])
        _activation[x.shape[0], cdiv(width, block)](
            x,
            out,
            source,
            x.stride(0),
            width,
            row,
            size,
            eps,
            gated,
            kind,
            block,
            norm_block(size),
            num_warps=block // 256,
            **early(x),
        )
    return out


@activation.impl("cuda", exact=True)
def _plain(x: Tensor, kind: str) -> Tensor:
    return activate(x, kind, gated=False)


@gated_activation.impl("cuda", exact=True)
def _gated(x: Tensor, kind: str) -> Tensor:
    return activate(x, kind, gated=True)
