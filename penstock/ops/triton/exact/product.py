"""A product as sums over parts of the inputs, each from zero, added in order.

Outputs lie along the first side of a tile, rows along the second: a tile of 16 rows takes the same kind of instruction
as one of 128, which only reaches further. A few rows have their parts computed side by side and added by a second
kernel; of many rows one program goes through the parts itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.product import product
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import activated
from penstock.ops.triton.rms_norm import normed
from penstock.ops.triton.sizes import cdiv

ROWS = 16, 32, 64, 128  # of a tile
FEW, MANY = ROWS[-2:]  # outputs of a tile of few rows, and of the largest one
PROGRAMS = 256  # for a few rows at least, where the inputs are enough
LEAST_BLOCKS = 4  # of a part
FINISHED = 1024  # outputs of a program that adds parts
TOGETHER = 8  # tiles of outputs that take turns, so that they find each other's rows in the cache


@triton.jit
def _sums(
    x,
    weight,
    row,
    out,
    start,
    end,
    width,
    x_row,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Over the inputs start … end - 1, for outputs out[OUTS] and rows row[ROWS]."""
    at = tl.arange(0, BLOCK)
    weights = weight + out.to(tl.int64)[:, None] * width + at[None, :]
    values = x + row.to(tl.int64)[:, None] * x_row + at[None, :]
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    for begin in range(start, end, BLOCK):
        inside = (begin + at < width)[None, :]
        w = tl.load(weights + begin, mask=inside, other=0.0)
        y = tl.load(values + begin, mask=inside, other=0.0)
        if w.dtype == tl.float8e4nv:  # its instructions keep few bits of a sum: it is taken out of them at times
            sums = tl.dot(w, tl.trans(y), sums, max_num_imprecise_acc=BLOCK)
        else:
            sums = tl.dot(w, tl.trans(y), sums, input_precision=PRECISION)
    return sums


@triton.jit
def _added(
    x,
    weight,
    row,
    out,
    share,
    width,
    x_row,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All parts, one after the other."""
    total = tl.zeros((OUTS, ROWS), tl.float32)
    for start in range(0, width, share):
        total += _sums(
            x, weight, row, out, start, tl.minimum(start + share, width), width, x_row, OUTS, ROWS, BLOCK, PRECISION
        )
    return total


@triton.jit
def _scaled(y, own, scale, bias, at, inside):
    """Sums in their own unit, with the bias."""
    if scale is not None:
        y = y * own * tl.load(scale + at, mask=inside, other=0.0)
    if bias is not None:
        y = y + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _parts(
    x,
    weight,
    parts,
    num_rows,
    num_out,
    width,
    share,
    x_row,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One part of a tile to parts[P, T, O]."""
    await_others(EARLY)
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    start = part * share
    y = _sums(
        x,
        weight,
        tl.minimum(t, num_rows - 1),
        tl.minimum(n, num_out - 1),
        start,
        tl.minimum(start + share, width),
        width,
        x_row,
        OUTS,
        ROWS,
        BLOCK,
        PRECISION,
    )
    at = (part.to(tl.int64) * num_rows + t)[None, :] * num_out + n[:, None]
    tl.store(parts + at, y, mask=(t < num_rows)[None, :] & (n < num_out)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _ended(
    parts,
    own,
    scale,
    bias,
    residual,
    out,
    num_rows,
    num_out,
    num_parts,
    residual_row,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some outputs of one row: its parts in order, and what follows the product."""
    await_others(EARLY)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    wide = num_out * (2 if GATED else 1)
    y = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        line = parts + (part * num_rows.to(tl.int64) + t) * wide
        y += tl.load(line + n, mask=inside, other=0.0)
        if GATED:
            up += tl.load(line + num_out + n, mask=inside, other=0.0)
    factor = None
    if own is not None:
        factor = tl.load(own + t)
    y = activated(_scaled(y, factor, scale, bias, n, inside), KIND)
    if GATED:
        y = y * _scaled(up, factor, scale, bias, num_out + n, inside)
    if residual is not None:
        y = tl.load(residual + t * residual_row + n, mask=inside, other=0.0).to(tl.float32) + y
    tl.store(out + t * num_out + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x,
    weight,
    own,
    scale,
    bias,
    residual,
    out,
    num_rows,
    num_out,
    width,
    share,
    x_row,
    residual_row,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of many rows, with what follows the product."""
    await_others(EARLY)
    in_turn = TOGETHER * tl.cdiv(num_rows, ROWS)
    first = tl.program_id(0) // in_turn * TOGETHER
    size = tl.minimum(tl.cdiv(num_out, OUTS) - first, TOGETHER)
    place = tl.program_id(0) % in_turn
    n = (first + place % size) * OUTS + tl.arange(0, OUTS)
    t = place // size * ROWS + tl.arange(0, ROWS)
    row, column = tl.minimum(t, num_rows - 1), tl.minimum(n, num_out - 1)
    at, there = n[:, None], (n < num_out)[:, None]
    inside = there & (t < num_rows)[None, :]
    factor = None
    if own is not None:
        factor = tl.load(own + row)[None, :]
    y = _added(x, weight, row, column, share, width, x_row, OUTS, ROWS, BLOCK, PRECISION)
    y = activated(_scaled(y, factor, scale, bias, at, there), KIND)
    if GATED:
        up = _added(x, weight, row, num_out + column, share, width, x_row, OUTS, ROWS, BLOCK, PRECISION)
        y = y * _scaled(up, factor, scale, bias, num_out + at, there)
    line = t.to(tl.int64)[None, :]
    if residual is not None:
        y = tl.load(residual + line * residual_row + at, mask=inside, other=0.0).to(tl.float32) + y
    tl.store(out + line * num_out + at, y.to(out.dtype.element_ty), mask=inside)


def split(num_out: int, width: int, block: int) -> tuple[int, int]:
    """How many parts a weight's inputs have, and inputs of each: a matter of its shape alone."""
    blocks = cdiv(width, block)
    wanted = min(cdiv(PROGRAMS, cdiv(num_out, FEW)), max(1, blocks // LEAST_BLOCKS))
    share = cdiv(blocks, wanted)
    return cdiv(blocks, share), share * block


def rows_of_tile(num_rows: int, dtype: torch.dtype) -> int:
    most = 32 if dtype == torch.float32 else MANY  # float32 has no such instructions
    return min(most, next((rows for rows in ROWS if rows >= num_rows), MANY))


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
    dtype: torch.dtype,
    own: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """As `product` without its norm, the sums times own[T] and scale[O] where they are given, in that dtype."""
    num_rows, (wide, width) = x.shape[0], weight.shape
    num_out = wide // 2 if gated else wide
    out = residual
    if out is None or not out.is_contiguous() or out.dtype != dtype:
        out = torch.empty((num_rows, num_out), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    residual_row = 0 if residual is None else residual.stride(0)
    rows, block = rows_of_tile(num_rows, x.dtype), 128 // x.element_size()
    num_parts, share = split(wide, width, block)
    outs = MANY if rows == MANY else FEW
    tiles = cdiv(num_rows, rows)
    options = {
        "num_warps": 8 if rows == MANY else 4,
        "num_stages": 2 if x.element_size() == 4 else 3 if rows == MANY else 5,
        "enable_fp_fusion": False,
        **early(x),
    }
    if num_rows > FEW and tiles * cdiv(wide, outs) >= PROGRAMS // 4:
        outs = FEW if gated else outs  # both halves' sums are kept at once
        _product[(tiles * cdiv(num_out, outs),)](
            x,
            weight,
            own,
            scale,
            bias,
            residual,
            out,
            num_rows,
            num_out,
            width,
            share,
            x.stride(0),
            residual_row,
            gated,
            activation or "",
            outs,
            rows,
            block,
            TOGETHER,
            "ieee",
            **options,
        )
        return out
    parts = torch.empty((num_parts, num_rows, wide), device=x.device)
    _parts[(cdiv(wide, outs), tiles, num_parts)](
        x, weight, parts, num_rows, wide, width, share, x.stride(0), outs, rows, block, "ieee", **options
    )
    _ended[(num_rows, cdiv(num_out, FINISHED))](
        parts,
        own,
        scale,
        bias,
        residual,
        out,
        num_rows,
        num_out,
        num_parts,
        residual_row,
        gated,
        activation or "",
        FINISHED,
        num_warps=4,
        enable_fp_fusion=False,
        **early(x),
    )
    return out


@product.impl("cuda", exact=True)
def _body(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    y = normed(x, norm, eps) if eps > 0 else x
    return multiply(y, weight, bias, residual, activation, gated, x.dtype)
