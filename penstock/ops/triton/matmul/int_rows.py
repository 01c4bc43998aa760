from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.int_product import PANEL, bits_of, sets_of
from penstock.ops.matmul.int_rows import int_rows
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import DEQUANTIZE_SPANS

ONE = 0x3F800000  # the bits of 1.0


@triton.jit
def decode_field(words, one, i: tl.constexpr, BITS: tl.constexpr):
    """Return field i of each word as a float from 1 to 2: 1 + code/256, for odd fields of 4 bits 1 + code/16. That is
    faster than converting integers. `one` is ONE, passed at run time so that and-or stays one instruction."""
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
def span_offset(row, span, num_pairs, BITS: tl.constexpr):
    """Return the offset of a row's span among a weight's words."""
    SPANS: tl.constexpr = BITS // 4  # of a pair
    return ((row // 8 * num_pairs + span // SPANS) * 8 + row % 8) * (2 * BITS) + span % SPANS * 8


@triton.jit
def scale_offset(row, span, num_pairs, BITS: tl.constexpr, SETS: tl.constexpr):
    """Return the offset of the scale of a row's span. Sets are words of a scale and a minimum or middle; the next set
    of a span is 8 further on."""
    SPANS: tl.constexpr = BITS // 4  # of a pair
    if SETS == 0:
        offset = ((row // 8 * num_pairs + span // 2) * 8 + row % 8) * 2 + span % 2
    else:
        offset = (row // 8 * num_pairs + span // SPANS) * (8 * SETS) + span % SPANS * (4 * SETS) + row % 8
    return offset


@triton.jit
def find_units(words, scales, row, unit, word, num_pairs, BITS: tl.constexpr, SETS: tl.constexpr):
    """Return where words of rows lie, and the scales of their units of 4 words."""
    place = words + span_offset(row[:, None], (word // 8)[None, :], num_pairs, BITS) + (word % 8)[None, :]
    return place, scales + scale_offset(row[:, None], (unit // 2)[None, :], num_pairs, BITS, SETS)


@triton.jit
def unpack_half(both, i: tl.constexpr):
    """Return the lower (0) or the upper (1) of the two float16 in a word, as float32."""
    return (both.to(tl.uint32, bitcast=True) >> 16 * i).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_scales(at, mask, SETS: tl.constexpr):
    """Load scales, and minimums or middles where there are sets."""
    if SETS > 0:
        both = tl.load(at, mask=mask, other=0)
        scale, minimum = unpack_half(both, 0), unpack_half(both, 1)
    else:
        scale = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        minimum = scale
    return scale, minimum


@triton.jit
def _decode_weight(words, scale, minimum, one, i: tl.constexpr, BITS: tl.constexpr, SETS: tl.constexpr):
    """Return the exact weights of field i."""
    f = decode_field(words, one, i, BITS)
    if SETS == 0:
        y = f * (256 * scale) - 384 * scale
    elif BITS == 8:
        y = (f - 1.5) * (256 * scale) + minimum
    else:
        y = (f - 1) * (256 * scale if i % 2 == 0 else 16 * scale) + minimum
    return y


@triton.jit
def _round_weight(words, scale, minimum, one, i: tl.constexpr, BITS: tl.constexpr, SETS: tl.constexpr, DTYPE):
    """Return the weights of field i, rounded step by step as `sum_ints` rounds them."""
    f = decode_field(words, one, i, BITS)
    if BITS == 8:
        code = (f - 1.5) * 256
    else:
        code = (f - 1) * (256 if i % 2 == 0 else 16) - 8
    y = code.to(DTYPE) * scale.to(DTYPE)
    if SETS > 0:
        y += (minimum + (8 * scale if BITS == 4 else 0)).to(DTYPE)
    return y


@triton.constexpr_function
def _asm(bits, f, is_bfloat16):
    """Return PTX that turns field f of two halves into two floats: code − 8 with 4 bits, code − 128 with 8. The code is
    put into the fraction of 128 (bfloat16) or 1024 (float16), which is subtracted again. The fraction of 128 holds
    seven bits; the eighth turns the −256 that is added into −128."""
    bare, less = (
        ("0x43004300", "0xC308C308") if is_bfloat16 else ("0x64006400", "0xE408E408" if bits == 4 else "0xE480E480")
    )
    moved = f"shr.b32 w, $1, {bits * f};" if f else "mov.b32 w, $1;"
    moved += f" mov.b32 b, {less};"
    if bits == 4:
        found = f"lop3.b32 a, w, 0x000F000F, {bare}, 0xEA;"  # (w & mask) | bare
    elif is_bfloat16:
        found = f"lop3.b32 a, w, 0x007F007F, {bare}, 0xEA; lop3.b32 b, w, 0x00800080, 0xC380C380, 0x6A;"  # &, ^
    else:
        found = f"lop3.b32 a, w, 0x00FF00FF, {bare}, 0xEA;"
    added = "mov.b32 c, 0x3F803F80; fma.rn.bf16x2 $0, a, c, b;" if is_bfloat16 else "add.rn.f16x2 $0, a, b;"
    return "{ .reg .b32 w, a, b, c; " + f"{moved} {found} {added}" + " }"


@triton.jit
def decode_halves(w, f: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return field f of halves, two at a time: code − 8 with 4 bits, code − 128 with 8. ASM halves the instructions;
    the interpreter goes without."""
    if ASM and DTYPE == tl.bfloat16:  # noqa: SIM300
        y = tl.inline_asm_elementwise(_asm(BITS, f, True), "=r,r", [w], tl.bfloat16, True, 2)
    elif ASM:
        y = tl.inline_asm_elementwise(_asm(BITS, f, False), "=r,r", [w], tl.float16, True, 2)
    else:
        code = (w.to(tl.uint16, bitcast=True) >> BITS * f) & ((1 << BITS) - 1)
        y = code.to(tl.float32)
        y = (y - (128 if BITS == 8 else 8)).to(DTYPE)
    return y


@triton.jit
def sum_ints(
    place,
    scale_at,
    values,
    first,
    end,
    width,
    BITS: tl.constexpr,
    SETS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    ASM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the products [OUTPUTS, ROWS] of weights and values[16, ROWS] over the pairs first … end - 1, PAIRS at a
    time. Weights are dequantized in the registers that feed the tensor cores, 16 inputs at a time."""
    k = tl.arange(0, 16)
    SCALES: tl.constexpr = 8 * SETS if SETS else 8  # words of a pair
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(first, end, PAIRS, num_stages=STAGES):
        for i in tl.static_range(PAIRS):
            p = start + i
            w = tl.load(place + p * (32 * BITS))
            both = tl.load(scale_at + p * SCALES)
            for f in tl.static_range(4):
                if f == 2 and BITS == 8:
                    w = tl.load(place + p * (32 * BITS) + 16)
                if SETS > 0 and f > 0 and f % (4 // SETS) == 0:
                    both = tl.load(scale_at + p * SCALES + f * SETS // 4 * 8)
                if f % 2 == 0 or SETS == 4:
                    scale = unpack_half(both, 0 if SETS else f // 2)
                    if SETS > 0:  # the value of code 8 or 128: rounding it loses less than rounding the minimum
                        middle = unpack_half(both, 1) + (8 * scale if BITS == 4 else 0)
                        middle = middle.to(DTYPE)[:, None]
                    scale = scale.to(DTYPE)[:, None]
                at = p * 64 + 16 * f
                if WHOLE:
                    v = tl.load(values + at)
                else:
                    v = tl.load(values + at, mask=(at + k < width)[:, None], other=0.0)
                weight = decode_halves(w, f % 2 if BITS == 8 else f, BITS, DTYPE, ASM) * scale
                if SETS > 0:
                    weight += middle
                acc = tl.dot(weight, v, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _dequantize_rows(
    ids,
    words,
    scales,
    out,
    num_rows,
    num_pairs,
    width,
    one,
    BITS: tl.constexpr,
    SETS: tl.constexpr,
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,
    ROUNDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantize SPANS spans of each of ROWS rows. ROUNDED are the weights that `sum_ints` multiplies, others exact
    until they are stored."""
    wait_for_previous(PDL)
    FIELDS: tl.constexpr = 16 // BITS
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    span = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    row = place
    if ids is not None:
        row = tl.load(ids + place, mask=place < num_rows, other=0)
    there = (place < num_rows)[:, None] & (span < num_pairs * (BITS // 4))[None, :]
    at = span_offset(row[:, None], span[None, :], num_pairs, BITS)
    w = tl.load(words + at[:, :, None] + tl.arange(0, 8)[None, None, :], mask=there[:, :, None], other=0)
    scale_at = scales + scale_offset(row[:, None], span[None, :], num_pairs, BITS, SETS)
    for f in tl.static_range(FIELDS):
        scale, minimum = load_scales(scale_at + f * SETS // 4 * 8, there, SETS)
        scale, minimum = scale[:, :, None], minimum[:, :, None]
        if ROUNDED:
            y = tl.join(
                _round_weight(w, scale, minimum, one, f, BITS, SETS, out.dtype.element_ty),
                _round_weight(w, scale, minimum, one, FIELDS + f, BITS, SETS, out.dtype.element_ty),
            )
        else:
            y = tl.join(
                _decode_weight(w, scale, minimum, one, f, BITS, SETS),
                _decode_weight(w, scale, minimum, one, FIELDS + f, BITS, SETS),
            )
        y = tl.reshape(y, (ROWS, SPANS, 16))
        k = (span * (16 * FIELDS) + 16 * f)[None, :, None] + tl.arange(0, 16)[None, None, :]
        tl.store(
            out + (place * width)[:, None, None] + k, y.to(out.dtype.element_ty), mask=there[:, :, None] & (k < width)
        )


def view_scales(scales: Tensor) -> Tensor:
    """View a scale and its minimum or middle as one word; bare scales as they are."""
    return scales if sets_of(scales) == 0 else scales.view(torch.int32)


def dequantize(
    out: Tensor, words: Tensor, scales: Tensor, ids: Tensor | None = None, as_multiplied: bool = False
) -> None:
    """Write rows `ids` of the matrix, or all of them, into out[T, C]: rounded once, or as a tile multiplies them."""
    num_rows, width = out.shape
    if not num_rows:
        return
    bits, num_pairs = bits_of(words), words.shape[1]
    num_spans = num_pairs * (bits // 4)
    rows = 1 if ids is not None else PANEL
    spans = min(DEQUANTIZE_SPANS // rows, power_of_2(num_spans))
    grid = cdiv(num_rows, rows), cdiv(num_spans, spans)
    _dequantize_rows[grid](
        ids,
        words,
        view_scales(scales),
        out,
        num_rows,
        num_pairs,
        width,
        ONE,
        bits,
        sets_of(scales),
        rows,
        spans,
        as_multiplied,
        num_warps=4,
        **({"enable_fp_fusion": False} if as_multiplied else {}),
        **pdl_options(out),
    )


@int_rows.impl("cuda", exact=True)
def _body(ids: Tensor, words: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty((ids.shape[0], width), dtype=dtype, device=ids.device)
    dequantize(out, words, scales, ids.contiguous())
    return out
