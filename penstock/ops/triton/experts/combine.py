from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.experts.combine import combine
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.numbers import sigmoid
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import ELEMENTWISE_BLOCK


@triton.jit
def _combine(
    y,
    weights,
    shared,
    gate,
    residual,
    out,
    shared_row,
    residual_row,
    width,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum a part of the NUM results of one row, in order."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    line = y + row * NUM * width + at
    total = tl.load(line, mask=inside, other=0.0).to(tl.float32) * tl.load(weights + row * NUM)
    for k in tl.static_range(1, NUM):
        value = tl.load(line + k * width, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weights + row * NUM + k)
    if shared is not None:
        beside = tl.load(shared + row * shared_row + at, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            beside *= sigmoid(tl.load(gate + row).to(tl.float32))
        total = beside + total
    if residual is not None:
        total = tl.load(residual + row * residual_row + at, mask=inside, other=0.0).to(tl.float32) + total
    tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=inside)


def _as_rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Return x[T, C] with contiguous rows, and how far they are apart."""
    if x is None:
        return None, 0
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


@combine.impl("cuda", exact=True)
def _body(
    y: Tensor,
    weights: Tensor | None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    num_rows, num_chosen, width = y.shape
    weights = torch.ones(y.shape[:2], device=y.device) if weights is None else weights
    out = torch.empty((num_rows, width), dtype=y.dtype, device=y.device)
    if out.numel():
        (shared, shared_row), (residual, residual_row) = _as_rows(shared), _as_rows(residual)
        _combine[(num_rows, cdiv(width, ELEMENTWISE_BLOCK))](
            y.contiguous(),
            weights.contiguous(),
            shared,
            None if gate is None else gate.contiguous(),
            residual,
            out,
            shared_row,
            residual_row,
            width,
            num_chosen,
            ELEMENTWISE_BLOCK,
            num_warps=4,
            **pdl_options(y),
        )
    return out
