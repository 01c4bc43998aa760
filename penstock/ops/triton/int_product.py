from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.int_product import FEW, SCRATCH_BYTES, TILES, int_product
from penstock.ops.triton.activation import activate
from penstock.ops.triton.int_rows import ONE, field, layout, scaling, widen, widened
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import activated
from penstock.ops.triton.product import NARROW
from penstock.ops.triton.rms_norm import normed
from penstock.ops.triton.sizes import cdiv, power_of_2

BLOCK = 1024
PROGRAMS = 384           # that a product of few rows is dealt out to, by splitting its inputs
LARGE_PROGRAMS = 128     # the same, of tiles of most rows

_scratch: dict[torch.device, Tensor] = {}


@triton.jit
def _units(part, total, added, scale, minimum, BITS: tl.constexpr):
    """What units add to outputs [R, U], for sums part[R, 4 U] of fields times inputs, and the inputs' own: total[4 U],
    and added[4 U] as they met the fields. What `field` has beside a code is taken off again."""
    UNITS: tl.constexpr = scale.shape[1]
    y = tl.sum(tl.reshape(part, (scale.shape[0], UNITS, 4)), 2)
    whole = tl.sum(tl.reshape(total, (UNITS, 4)), 1)[None, :]
    if BITS == 4:
        return (16 * scale) * (y - tl.sum(tl.reshape(added, (UNITS, 4)), 1)[None, :]) + minimum * whole
    else:
        return (256 * scale) * (y - 1.5 * whole)


@triton.jit
def _int_row(x, words, scales, bias, residual, norm, out, num_out, num_units, width, eps, one, BITS: tl.constexpr,
             NORMED: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
             AHEAD: tl.constexpr, EARLY: tl.constexpr):
    """One row times ROWS outputs. The norm's factor is applied to the sums, so that x is read once; weights are read
    one block ahead, the first before x is there."""
    FIELDS: tl.constexpr = 32 // BITS
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, num_out - 1).to(tl.int64)       # beyond the last it is the last once more
    unit, word = tl.arange(0, UNITS), tl.arange(0, UNITS * 4)
    at = (row * num_units)[:, None] + unit[None, :]
    second = num_out.to(tl.int64) * num_units           # from a gate to its value
    place = words + (row * num_units * 4)[:, None] + word[None, :]
    some = (word < num_units * 4)[None, :]
    w = tl.load(place, mask=some, other=0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(place + second * 4, mask=some, other=0, eviction_policy="evict_first")
    await_others(EARLY)
    sums = tl.zeros((ROWS, UNITS), tl.float32)
    ups = tl.zeros((ROWS, UNITS), tl.float32)
    squares = tl.zeros((UNITS * 4,), tl.float32)
    for start in range(0, num_units if AHEAD else UNITS, UNITS):
        next_w, next_u = w, u
        if AHEAD:
            some = ((start + UNITS) * 4 + word < num_units * 4)[None, :]
            next_w = tl.load(place + (start + UNITS) * 4, mask=some, other=0, eviction_policy="evict_first")
            if GATED:
                next_u = tl.load(place + (second + start + UNITS) * 4, mask=some, other=0,
                                 eviction_policy="evict_first")
        inside = (start + unit < num_units)[None, :]
        scale, minimum = scaling(scales, at + start, inside, BITS)
        part, up_part = tl.zeros((ROWS, UNITS * 4), tl.float32), tl.zeros((ROWS, UNITS * 4), tl.float32)
        total, added = tl.zeros((UNITS * 4,), tl.float32), tl.zeros((UNITS * 4,), tl.float32)
        for i in tl.static_range(FIELDS):
            k = (start + word // 4) * (4 * FIELDS) + 4 * i + word % 4
            value = tl.load(x + k, mask=k < width, other=0.0).to(tl.float32)
            if NORMED:
                squares += value * value
            if norm is not None:
                value *= tl.load(norm + k, mask=k < width, other=0.0)
            total += value
            if BITS == 4 and i % 2 == 0:
                value *= 16.0
            added += value
            part += field(w, one, i, BITS) * value[None, :]
            if GATED:
                up_part += field(u, one, i, BITS) * value[None, :]
        sums += _units(part, total, added, scale, minimum, BITS)
        if GATED:
            scale, minimum = scaling(scales, at + second + start, inside, BITS)
            ups += _units(up_part, total, added, scale, minimum, BITS)
        w, u = next_w, next_u
    y, up = tl.sum(sums, 1), tl.sum(ups, 1)
    if NORMED:
        factor = tl.rsqrt(tl.sum(squares) / width + eps)
        y *= factor
        up *= factor
    if bias is not None:
        y += tl.load(bias + row)
        if GATED:
            up += tl.load(bias + num_out + row)
    y = activated(y, KIND)
    if GATED:
        y *= up
    if residual is not None:
        y += tl.load(residual + row).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < num_out)


@triton.jit(do_not_specialize=["num_rows"])
def _int_tile(x, words, scales, sums, num_rows, num_out, num_units, width, x_row, steps, one, BITS: tl.constexpr,
              OUTPUTS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, EARLY: tl.constexpr):
    """OUTPUTS outputs of ROWS rows over one part of the inputs, `steps` times UNITS units, into sums[part, T, O]."""
    INPUTS: tl.constexpr = UNITS * 128 // BITS
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(2) * steps
    row = tl.minimum(n, num_out - 1).to(tl.int64)
    unit, word, input = tl.arange(0, UNITS), tl.arange(0, UNITS * 4), tl.arange(0, INPUTS)
    at = (row * num_units)[:, None] + unit[None, :]
    place = words + (row * num_units * 4)[:, None] + word[None, :]
    values = x + r.to(tl.int64)[None, :] * x_row + input[:, None]
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    await_others(EARLY)
    for step in range(first, tl.minimum(first + steps, tl.cdiv(num_units, UNITS))):
        start = step * UNITS
        inside = (start + unit < num_units)[None, :]
        w = tl.load(place + start * 4, mask=(start * 4 + word < num_units * 4)[None, :], other=0)
        scale, minimum = scaling(scales, at + start, inside, BITS)
        v = tl.load(values + step * INPUTS, mask=(r < num_rows)[None, :] & (step * INPUTS + input < width)[:, None],
                    other=0.0)
        acc = tl.dot(widened(w, scale, minimum, one, BITS, False, x.dtype.element_ty), v, acc)
    line = (tl.program_id(2).to(tl.int64) * num_rows + r)[None, :] * num_out
    tl.store(sums + line + n[:, None], acc.to(sums.dtype.element_ty),
             mask=(n < num_out)[:, None] & (r < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _int_finished(sums, bias, residual, out, num_rows, num_out, residual_row, PARTS: tl.constexpr, GATED: tl.constexpr,
                  KIND: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The parts' sums together, and what follows the product."""
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    line = num_out * (2 if GATED else 1)
    y, up = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        place = sums + (part * num_rows + row) * line + n
        y += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(place + num_out, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + n, mask=inside, other=0.0)
        if GATED:
            up += tl.load(bias + num_out + n, mask=inside, other=0.0)
    y = activated(y, KIND)
    if GATED:
        y *= up
    if residual is not None:
        y += tl.load(residual + row * residual_row + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_out + n, y.to(out.dtype.element_ty), mask=inside)


def _finish(sums: Tensor, dtype: torch.dtype, bias: Tensor | None, residual: Tensor | None, activation: str | None,
            gated: bool) -> Tensor:
    """sums[parts, T, O] → [T, O], gated [T, O/2], where the residual lies if it can be."""
    num_parts, num_rows, num_sums = sums.shape
    num_out = num_sums // 2 if gated else num_sums
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    out = residual
    if out is None or not out.is_contiguous():
        out = torch.empty((num_rows, num_out), dtype=dtype, device=sums.device)
    _int_finished[(num_rows, cdiv(num_out, BLOCK))](
        sums, bias, residual, out, num_rows, num_out, num_out if residual is None else residual.stride(0), num_parts,
        gated, activation or "", BLOCK, num_warps=4, **early(sums))
    return out


def _row_shape(num_units: int, num_out: int) -> tuple[int, int]:
    """Outputs a program, and units at a time, one to a thread: so many that x is read for several outputs, and that
    there are some programs for every processor."""
    rows = min(8, max(1, power_of_2(num_out // 512 + 1) // 2))
    if num_units <= 256:
        return rows, power_of_2(num_units)
    return rows, 64 if num_units % 128 and num_units <= 1024 else 128


def _one_row(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, residual: Tensor | None,
             activation: str | None, gated: bool, norm: Tensor | None, eps: float) -> Tensor:
    """As `product.one_row`."""
    if gated and x.shape[1] > NARROW and activation is not None:
        y = activate(_one_row(x, words, scales, bias, None, None, False, norm, eps), activation, gated=True)
        return y if residual is None else residual.add_(y)
    num_out = words.shape[0] // 2 if gated else words.shape[0]
    given, num_units, bits = layout(words, scales)
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    rows, units = _row_shape(num_units, num_out)
    _int_row[(cdiv(num_out, rows),)](
        x, words, given, bias, residual, norm, out, num_out, num_units, x.shape[1], eps, ONE, bits, eps > 0, gated,
        activation or "", rows, units, num_units > units, num_warps=max(1, units // 32), **early(x))
    return out


def _tile_shape(num_rows: int, bits: int) -> tuple[int, int, int, dict[str, int]]:
    """Outputs, rows and units of a tile, and how it is compiled; 128 inputs at a time, of few rows 256 in 4 bits, and
    of most rows 64, so that several programs find room on a processor."""
    rows = next((size for size in TILES if size >= num_rows), TILES[-1])
    if rows == TILES[-1]:
        return 128, rows, bits // 2, {"num_warps": 8, "num_stages": 4}
    return 64, rows, 8 if bits == 8 or rows <= 32 else 4, {"num_warps": 4, "num_stages": 4 if rows == 16 else 3}


def _few_rows(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, residual: Tensor | None,
              activation: str | None, gated: bool) -> Tensor:
    given, num_units, bits = layout(words, scales)
    num_rows, num_out = x.shape[0], words.shape[0]
    outputs, rows, units, options = _tile_shape(num_rows, bits)
    tiles, steps = cdiv(num_out, outputs), cdiv(num_units, units)
    wanted = max(1, (LARGE_PROGRAMS if rows == TILES[-1] else PROGRAMS) // tiles)
    num_parts = min(power_of_2(wanted + 1) // 2, max(1, steps // 2))
    per_part = cdiv(steps, num_parts)
    num_parts = cdiv(steps, per_part)
    bare = num_parts == 1 and not gated and bias is None and residual is None and activation is None
    sums = torch.empty((num_parts, num_rows, num_out), dtype=x.dtype if bare else torch.float32, device=x.device)
    _int_tile[(tiles, cdiv(num_rows, rows), num_parts)](
        x, words, given, sums, num_rows, num_out, num_units, x.shape[1], x.stride(0), per_part, ONE, bits, outputs,
        rows, units, **options, **early(x))
    return sums[0] if bare else _finish(sums, x.dtype, bias, residual, activation, gated)


def scratch(device: torch.device) -> Tensor:
    """Where matrices are widened, one part after the other, by all products of many rows on the device: these follow
    each other on one stream. It never moves, since recorded steps know its address."""
    if device not in _scratch:
        _scratch[device] = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    return _scratch[device]


def _many_rows(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, residual: Tensor | None,
               activation: str | None, gated: bool) -> Tensor:
    (num_rows, width), num_out = x.shape, words.shape[0]
    room = scratch(x.device).view(x.dtype)
    at_once = max(1, len(room) // width)
    sums = torch.empty((1, num_rows, num_out), dtype=x.dtype, device=x.device)
    for first in range(0, num_out, at_once):
        part = slice(first, min(first + at_once, num_out))
        weight = room[:(part.stop - first) * width].view(-1, width)
        widen(weight, words[part], scales[part])
        torch.mm(x, weight.t(), out=sums[0, :, part])
    bare = not gated and bias is None and residual is None and activation is None
    return sums[0] if bare else _finish(sums, x.dtype, bias, residual, activation, gated)


@int_product.impl("cuda", exact=False)
def _body(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
          activation: str | None = None, gated: bool = False, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """One row by a kernel that takes in what stands before and after the product, few by one that widens weights on
    their way to the tensor cores, many by cuBLAS with weights widened before."""
    if x.shape[0] == 1 and x.is_contiguous():
        return _one_row(x, words, scales, bias, residual, activation, gated, norm, eps)
    y = normed(x, norm, eps) if eps > 0 else x
    y = y if y.stride(1) == 1 else y.contiguous()
    if not y.shape[0]:
        return y.new_empty((0, words.shape[0] // 2 if gated else words.shape[0]))
    multiply = _few_rows if y.shape[0] <= FEW and y.dtype != torch.float32 else _many_rows
    return multiply(y, words, scales, bias, residual, activation, gated)
