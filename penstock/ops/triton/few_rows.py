"""A few rows times a matrix of some thousand outputs, for which the library's kernels wait for the one before them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.triton.launch import await_others, early, is_roomy
from penstock.ops.triton.numbers import activated
from penstock.ops.triton.sizes import cdiv, power_of_2

OUTPUTS, INPUTS = 64, 128  # of a program at once


@triton.jit(do_not_specialize=["num_rows"])
def _few(
    x,
    weight,
    bias,
    residual,
    out,
    num_rows,
    num_out,
    x_row,
    eps,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """COLS outputs of all rows, or half as many gates and after them what they are multiplied with. The norm's factors
    are applied to the sums, so that x is read once."""
    await_others(EARLY)
    m, at, c = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, COLS)
    OWN: tl.constexpr = COLS // 2 if GATED else COLS
    n = tl.program_id(0) * OWN + tl.arange(0, OWN)
    row = tl.minimum(tl.program_id(0) * OWN + c % OWN, num_out - 1).to(tl.int64)  # beyond the last the last again
    row += c // OWN * num_out
    there = (m < num_rows)[:, None]
    place = weight + row[:, None] * WIDTH + at[None, :]
    sums = tl.zeros((COLS, ROWS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        inside = (start + at < WIDTH)[None, :]
        values = tl.load(x + m[:, None] * x_row + start + at[None, :], mask=there & inside, other=0.0)
        w = tl.load(place + start, mask=inside, other=0.0)
        sums = tl.dot(w, tl.trans(values), sums)
        if NORMED:
            squares += tl.sum(values.to(tl.float32) * values.to(tl.float32), 1)
    if NORMED:
        sums *= tl.rsqrt(squares / WIDTH + eps)[None, :]
    if bias is not None:
        sums += tl.load(bias + row).to(tl.float32)[:, None]
    y = sums
    if GATED:
        y, ups = tl.split(tl.permute(tl.reshape(sums, (2, OWN, ROWS)), (1, 2, 0)))
    y = activated(y, KIND)
    if GATED:
        y *= ups
    spot = m[None, :] * num_out + n[:, None]
    wanted = (m < num_rows)[None, :] & (n < num_out)[:, None]
    if residual is not None:
        y += tl.load(residual + spot, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + spot, y.to(out.dtype.element_ty), mask=wanted)


def _stages(device: torch.device, width: int) -> int:
    """Blocks of inputs on their way at once, measured on an H200; Ada's shared memory has room for three."""
    return 3 if not is_roomy(device) else 6 if width > 2048 else 4


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
    eps: float,
) -> Tensor:
    """As `product` without a norm's weights; it is written where the residual lies."""
    num_rows, width = x.shape
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    residual = None if residual is None else residual.contiguous()
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device) if residual is None else residual
    _few[(cdiv(weight.shape[0], OUTPUTS),)](
        x,
        weight,
        bias,
        residual,
        out,
        num_rows,
        num_out,
        x.stride(0),
        eps,
        eps > 0,
        gated,
        activation or "",
        width,
        max(16, power_of_2(num_rows)),
        OUTPUTS,
        INPUTS,
        _stages(x.device, width),
        num_warps=4,
        **early(x),
    )
    return out
