from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.int_product import UNIT
from penstock.ops.int_rows import int_rows
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.sizes import cdiv, power_of_2

WIDENED_UNITS = 256      # in one program
ONE = 0x3F800000         # the bits of 1.0


@triton.jit
def field(words, one, i: tl.constexpr, BITS: tl.constexpr):
    """Field i of each word as part of a number from 1 to 2: 1 + code/256, of odd fields of 4 bits 1 + code/16. Turning
    integers into floats takes more operations, and slower ones. `one` is ONE, as an argument of the kernel: of two
    constants in an operation the compiler makes two operations."""
    FIRST: tl.constexpr = 15 - BITS * i + (BITS if BITS == 4 and i % 2 == 1 else 0)
    moved = words.to(tl.uint32)
    if FIRST > 0:
        moved = moved << FIRST
    else:
        moved = moved >> -FIRST
    if BITS == 8:
        bits = moved & 0x7F8000
    elif i % 2 == 0:
        bits = moved & 0x78000
    else:
        bits = moved & 0x780000
    return (bits | one).to(tl.float32, bitcast=True)


@triton.jit
def scaling(scales, at, mask, BITS: tl.constexpr):
    """Scales and minimums of the units `at`, float32; 8 bits have no minimums, and two units to a group."""
    if BITS == 4:
        both = tl.load(scales + at, mask=mask, other=0).to(tl.uint32)
        scale = both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return scale, (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = tl.load(scales + at // 2, mask=mask, other=0.0).to(tl.float32)
        return scale, scale


@triton.jit
def _value(words, scale, minimum, one, i: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr):
    """The weights of field i. Unless exact, a 4-bit one may be off by 2^-16 of its scale."""
    f = field(words, one, i, BITS)
    if BITS == 8:
        y = f * (256 * scale) - 384 * scale
    else:
        step = 256 * scale if i % 2 == 0 else 16 * scale
        if EXACT:
            y = (f - 1) * step + minimum
        else:
            y = f * step + (minimum - step)
    return y.to(DTYPE)


@triton.jit
def widened(words, scale, minimum, one, BITS: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr):
    """Words [R, 4 U] with scales and minimums [R, U] → weights [R, inputs of U units] in their order."""
    words = tl.reshape(words, (scale.shape[0], scale.shape[1], 4))
    s, m = scale[:, :, None], minimum[:, :, None]
    a = tl.join(_value(words, s, m, one, 0, BITS, EXACT, DTYPE), _value(words, s, m, one, 1, BITS, EXACT, DTYPE))
    b = tl.join(_value(words, s, m, one, 2, BITS, EXACT, DTYPE), _value(words, s, m, one, 3, BITS, EXACT, DTYPE))
    y = tl.join(a, b)                     # [R, U, word, i % 2, i // 2]
    if BITS == 8:
        y = tl.permute(y, (0, 1, 4, 3, 2))
    else:
        a = tl.join(_value(words, s, m, one, 4, BITS, EXACT, DTYPE), _value(words, s, m, one, 5, BITS, EXACT, DTYPE))
        b = tl.join(_value(words, s, m, one, 6, BITS, EXACT, DTYPE), _value(words, s, m, one, 7, BITS, EXACT, DTYPE))
        y = tl.permute(tl.join(y, tl.join(a, b)), (0, 1, 5, 4, 3, 2))
    return tl.reshape(y, (scale.shape[0], scale.shape[1] * 128 // BITS))


@triton.jit(do_not_specialize=["num_rows"])
def _int_rows(ids, words, scales, out, num_rows, num_units, width, one, BITS: tl.constexpr, ROWS: tl.constexpr,
              UNITS: tl.constexpr, EARLY: tl.constexpr):
    """ROWS rows, UNITS units of each, widened."""
    await_others(EARLY)
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    word = tl.program_id(1) * UNITS * 4 + tl.arange(0, UNITS * 4)
    row = place
    if ids is not None:
        row = tl.load(ids + place, mask=place < num_rows, other=0)
    known = (place < num_rows)[:, None]
    w = tl.load(words + (row * num_units * 4)[:, None] + word[None, :], mask=known & (word < num_units * 4)[None, :],
                other=0)
    at = (row * num_units)[:, None] + unit[None, :]
    scale, minimum = scaling(scales, at, known & (unit < num_units)[None, :], BITS)
    INPUTS: tl.constexpr = UNITS * 128 // BITS
    k = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    y = widened(w, scale, minimum, one, BITS, True, out.dtype.element_ty)
    tl.store(out + (place * width)[:, None] + k[None, :], y, mask=known & (k < width)[None, :])


def layout(words: Tensor, scales: Tensor) -> tuple[Tensor, int, int]:
    """Scales as kernels read them, a scale and its minimum in one word; units in a row; bits."""
    bits = words.shape[2]
    return scales if bits == 8 else scales.view(torch.int32), words.shape[1] * bits // UNIT, bits


def widen(out: Tensor, words: Tensor, scales: Tensor, ids: Tensor | None = None) -> None:
    """Rows of the matrix, those of `ids` or all of them, into out[T, C]."""
    num_rows, width = out.shape
    if not num_rows:
        return
    given, num_units, bits = layout(words, scales)
    units = min(WIDENED_UNITS, power_of_2(num_units))
    rows = 1 if ids is not None else WIDENED_UNITS // units
    grid = cdiv(num_rows, rows), cdiv(num_units, units)
    _int_rows[grid](ids, words, given, out, num_rows, num_units, width, ONE, bits, rows, units, num_warps=4,
                    **early(out))


@int_rows.impl("cuda", exact=True)
def _body(ids: Tensor, words: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty((ids.shape[0], width), dtype=dtype, device=ids.device)
    widen(out, words, scales, ids.contiguous())
    return out
