from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.int_product import FEW, PAIR, PANEL, SCRATCH_BYTES, TILES, bits_of, int_product
from penstock.ops.triton.activation import activate
from penstock.ops.triton.int_rows import ONE, as_read, field, half, scale_place, scaling, span_place, widen
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import activated
from penstock.ops.triton.product import NARROW
from penstock.ops.triton.rms_norm import normed
from penstock.ops.triton.sizes import cdiv, nearest_power_of_2, power_of_2

BLOCK = 1024
STAGES = 3  # tiles of weights on their way, and at work
LARGE = 1 << 24  # weights; fewer make too few wide tiles
MANY_OUT = 4096  # outputs; fewer make too few tiles of 128
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_scratch: dict[torch.device, Tensor] = {}


@triton.jit
def _two(x, at, width, PAIRED: tl.constexpr, DTYPE: tl.constexpr):
    """Values 2 at and 2 at + 1 in float32: in one go where x is given as two values in one number."""
    k = 2 * at
    if PAIRED:
        both = tl.load(x + at, mask=k < width, other=0)
        if DTYPE == tl.bfloat16:  # noqa: SIM300
            a, b = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
        elif DTYPE == tl.float16:  # noqa: SIM300
            a, b = half(both, 0), half(both, 1)
        else:
            a = both.to(tl.int32).to(tl.float32, bitcast=True)
            b = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        a = tl.load(x + k, mask=k < width, other=0.0).to(tl.float32)
        b = tl.load(x + k + 1, mask=k + 1 < width, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _units(part, total, added, scale, minimum, BITS: tl.constexpr):
    """What units of 4 words add to outputs [R, U], for sums part[R, 4 U] of one group's fields times inputs, and those
    of the inputs: total[4 U], and added[4 U] as they met the fields. What `field` has beside a code is taken off again;
    results are 256 times too small, of 4 bits 16 times."""
    UNITS: tl.constexpr = scale.shape[1]
    y = tl.sum(tl.reshape(part, (scale.shape[0], UNITS, 4)), 2)
    whole = tl.sum(tl.reshape(total, (UNITS, 4)), 1)
    if BITS == 4:
        y -= tl.sum(tl.reshape(added, (UNITS, 4)), 1)[None, :]
        return scale * y + minimum * (whole / 16)[None, :]
    else:
        return scale * (y - (1.5 * whole)[None, :])


@triton.jit
def _int_row(
    x,
    words,
    scales,
    bias,
    residual,
    norm,
    out,
    num_out,
    num_pairs,
    width,
    eps,
    one,
    BITS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM_PAIRED: tl.constexpr,
    DTYPE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row times ROWS outputs. The norm's factor is applied to the sums, so that x is read once; weights are read
    one block ahead, the first before x is there."""
    FIELDS: tl.constexpr = 16 // BITS
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, num_out - 1).to(tl.int64)  # beyond the last it is the last once more
    unit, word = tl.arange(0, UNITS), tl.arange(0, UNITS * 4)
    num_units = num_pairs * (BITS // 2)
    place = words + span_place(row[:, None], (word // 8)[None, :], num_pairs, BITS) + (word % 8)[None, :]
    scale_at = scales + scale_place(row[:, None], (unit // 2)[None, :], num_pairs, BITS)
    other = num_out + row
    second = words + span_place(other[:, None], (word // 8)[None, :], num_pairs, BITS) + (word % 8)[None, :]
    second_at = scales + scale_place(other[:, None], (unit // 2)[None, :], num_pairs, BITS)
    some = (word < num_units * 4)[None, :]
    w = tl.load(place, mask=some, other=0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(second, mask=some, other=0, eviction_policy="evict_first")
    await_others(EARLY)
    sums = tl.zeros((ROWS, UNITS), tl.float32)
    ups = tl.zeros((ROWS, UNITS), tl.float32)
    squares = tl.zeros((UNITS * 4,), tl.float32)
    for start in range(0, num_units if AHEAD else UNITS, UNITS):
        next_w, next_u = w, u
        if AHEAD:
            some = ((start + UNITS) * 4 + word < num_units * 4)[None, :]
            further = (start + UNITS) * 32  # words of a panel's units together
            next_w = tl.load(place + further, mask=some, other=0, eviction_policy="evict_first")
            if GATED:
                next_u = tl.load(second + further, mask=some, other=0, eviction_policy="evict_first")
        inside = (start + unit < num_units)[None, :]
        here, there = scale_at + start * (32 // BITS), second_at + start * (32 // BITS)
        for group in tl.static_range(8 // BITS):
            part, up_part = tl.zeros((ROWS, UNITS * 4), tl.float32), tl.zeros((ROWS, UNITS * 4), tl.float32)
            total, added = tl.zeros((UNITS * 4,), tl.float32), tl.zeros((UNITS * 4,), tl.float32)
            for f in tl.static_range(2 * group, 2 * group + 2):
                at = (start // 2 + word // 8) * (8 * FIELDS) + 8 * f + word % 8
                a, b = _two(x, at, width, PAIRED, DTYPE)
                if NORMED:
                    squares += a * a + b * b
                if norm is not None:
                    c, d = _two(norm, at, width, NORM_PAIRED, tl.float32)
                    a *= c
                    b *= d
                total += a + b
                if BITS == 4 and f % 2 == 0:
                    a *= 16.0
                    b *= 16.0
                    added += 16.0 * total
                else:
                    added += a + b
                part += field(w, one, f, BITS) * a[None, :]
                part += field(w, one, FIELDS + f, BITS) * b[None, :]
                if GATED:
                    up_part += field(u, one, f, BITS) * a[None, :]
                    up_part += field(u, one, FIELDS + f, BITS) * b[None, :]
            scale, minimum = scaling(here + 8 * group, inside, BITS)
            sums += _units(part, total, added, scale, minimum, BITS)
            if GATED:
                scale, minimum = scaling(there + 8 * group, inside, BITS)
                ups += _units(up_part, total, added, scale, minimum, BITS)
        w, u = next_w, next_u
    factor = 256.0 if BITS == 8 else 16.0
    if NORMED:
        factor *= tl.rsqrt(tl.sum(squares) / width + eps)
    y, up = factor * tl.sum(sums, 1), factor * tl.sum(ups, 1)
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


@triton.constexpr_function
def _asm(bits, f, is_bfloat16):
    """Field f of two halves as two floats, of 4 bits less 8, of 8 bits less 128. Its bits are put where those of a
    number's fraction are, and the number is taken off again: 128 in bfloat16, 1024 in float16. The fraction of 128 has
    room for seven bits; the eighth makes −128 of the −256 that is added."""
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
def _codes(w, f: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Field f of halves, two at a time: the code, of 4 bits less 8, of 8 bits less 128. The compiler would take twice
    as many operations; it is left to it where there is no GPU."""
    if ASM and DTYPE == tl.bfloat16:  # noqa: SIM300
        y = tl.inline_asm_elementwise(_asm(BITS, f, True), "=r,r", [w], tl.bfloat16, True, 2)
    elif ASM:
        y = tl.inline_asm_elementwise(_asm(BITS, f, False), "=r,r", [w], tl.float16, True, 2)
    else:
        code = (w.to(tl.uint16, bitcast=True) >> BITS * f) & ((1 << BITS) - 1)
        y = code.to(tl.float32)
        y = (y - (128 if BITS == 8 else 8)).to(DTYPE)
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _int_tile(
    x,
    halves,
    scales,
    sums,
    num_rows,
    num_out,
    num_pairs,
    width,
    x_row,
    steps,
    BITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """OUTPUTS outputs of all rows over one part of the inputs, `steps` times PAIRS pairs, into sums[part, T, O].
    Weights become floats in the registers from which the tensor cores take them, 16 inputs at a time."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(n, num_out - 1).to(tl.int64)
    r, k = tl.arange(0, ROWS), tl.arange(0, 16)
    first = tl.program_id(1) * steps * PAIRS
    place = halves + ((row // 8 * num_pairs * 8 + row % 8) * (4 * BITS))[:, None] + k[None, :]
    scale_at = scales + row // 8 * num_pairs * (64 // BITS) + row % 8
    values = x + tl.minimum(r, num_rows - 1).to(tl.int64)[None, :] * x_row + k[:, None]
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    await_others(EARLY)
    for start in tl.range(first, tl.minimum(first + steps * PAIRS, num_pairs), PAIRS, num_stages=STAGES):
        for i in tl.static_range(PAIRS):
            p = start + i
            w = tl.load(place + p * (32 * BITS))
            both = tl.load(scale_at + p * (64 // BITS))
            for group in tl.static_range(2):
                if group == 1:
                    if BITS == 8:
                        w = tl.load(place + p * (32 * BITS) + 16)
                    else:
                        both = tl.load(scale_at + p * (64 // BITS) + 8)
                scale = half(both, group if BITS == 8 else 0)
                middle = scale
                if BITS == 4:  # that of code 8, which loses less when it is rounded than a minimum does
                    middle = (half(both, 1) + 8 * scale).to(DTYPE)[:, None]
                scale = scale.to(DTYPE)[:, None]
                for f in tl.static_range(2):
                    at = p * 64 + (32 * group + 16 * f)
                    if WHOLE:
                        v = tl.load(values + at)
                    else:
                        v = tl.load(values + at, mask=(at + k < width)[:, None], other=0.0)
                    if BITS == 8:
                        weight = _codes(w, f, BITS, DTYPE, ASM) * scale
                    else:
                        weight = _codes(w, 2 * group + f, BITS, DTYPE, ASM) * scale + middle
                    acc = tl.dot(weight, v, acc)
    line = (tl.program_id(1).to(tl.int64) * num_rows + r)[None, :] * num_out
    tl.store(
        sums + line + n[:, None], acc.to(sums.dtype.element_ty), mask=(n < num_out)[:, None] & (r < num_rows)[None, :]
    )


@triton.jit(do_not_specialize=["num_rows"])
def _int_finished(
    sums,
    bias,
    residual,
    out,
    num_rows,
    num_out,
    residual_row,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
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


def _finish(
    sums: Tensor, dtype: torch.dtype, bias: Tensor | None, residual: Tensor | None, activation: str | None, gated: bool
) -> Tensor:
    """sums[parts, T, O] → [T, O], gated [T, O/2], where the residual lies if it can be."""
    num_parts, num_rows, num_sums = sums.shape
    num_out = num_sums // 2 if gated else num_sums
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    out = residual
    if out is None or not out.is_contiguous():
        out = torch.empty((num_rows, num_out), dtype=dtype, device=sums.device)
    _int_finished[(num_rows, cdiv(num_out, BLOCK))](
        sums,
        bias,
        residual,
        out,
        num_rows,
        num_out,
        num_out if residual is None else residual.stride(0),
        num_parts,
        gated,
        activation or "",
        BLOCK,
        num_warps=4,
        **early(sums),
    )
    return out


def _row_shape(num_units: int, num_out: int) -> tuple[int, int]:
    """Outputs a program, and units at a time, one to a thread: so many that x is read for several outputs, and that
    there are some programs for every processor."""
    rows = min(8, max(1, power_of_2(num_out // 512 + 1) // 2))
    if num_units <= 256:
        return rows, power_of_2(num_units)
    return rows, 64 if num_units % 128 and num_units <= 1024 else 128


def _paired(values: Tensor | None) -> tuple[Tensor | None, bool]:
    """Contiguous values, two of them in one number where that can be."""
    if values is None or values.numel() % 2 or values.storage_offset() % 2:
        return values, False
    return values.view(-1).view(torch.int64 if values.itemsize == 4 else torch.int32), True


def _one_row(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_out: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    """As `product.one_row`."""
    if gated and x.shape[1] > NARROW and activation is not None:
        y = activate(_one_row(x, words, scales, num_out, bias, None, None, False, norm, eps), activation, gated=True)
        return y if residual is None else residual.add_(y)
    num_results = num_out // 2 if gated else num_out
    bits, num_pairs = bits_of(words), words.shape[1]
    num_units = num_pairs * bits // 2
    out = torch.empty((1, num_results), dtype=x.dtype, device=x.device)
    rows, units = _row_shape(num_units, num_results)
    values, is_paired = _paired(x)
    weights, norm_is_paired = _paired(None if norm is None else norm.float())
    _int_row[(cdiv(num_results, rows),)](
        values,
        words,
        as_read(scales),
        bias,
        residual,
        weights,
        out,
        num_results,
        num_pairs,
        x.shape[1],
        eps,
        ONE,
        bits,
        eps > 0,
        gated,
        activation or "",
        rows,
        units,
        num_units > units,
        is_paired,
        norm_is_paired,
        DTYPES[x.dtype],
        num_warps=max(1, units // 32),
        **early(x),
    )
    return out


def _tile_shape(num_rows: int, num_out: int, num_pairs: int) -> tuple[int, int, int, int, int]:
    """Outputs, rows and pairs of a tile, its warps, and how many tiles are wanted; measured on an H200."""
    rows = next(size for size in TILES if size >= num_rows)
    if rows == TILES[0] or num_out < MANY_OUT:
        return 64, rows, 1 if num_pairs % 2 else 2, 2, 660
    if num_out * num_pairs * PAIR < LARGE:
        return 128, rows, 1, 4, 264
    return 256, rows, 1, 8, 132 if rows == TILES[-1] else 170


def _few_rows(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_out: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
) -> Tensor:
    (num_rows, width), num_pairs = x.shape, words.shape[1]
    outputs, rows, pairs, num_warps, wanted = _tile_shape(num_rows, num_out, num_pairs)
    tiles, steps = cdiv(num_out, outputs), num_pairs // pairs
    num_parts = max(1, min(nearest_power_of_2(wanted / tiles), steps // 2))
    per_part = cdiv(steps, num_parts)
    num_parts = cdiv(steps, per_part)
    bare = num_parts == 1 and not gated and bias is None and residual is None and activation is None
    sums = torch.empty((num_parts, num_rows, num_out), dtype=x.dtype if bare else torch.float32, device=x.device)
    _int_tile[(tiles, num_parts)](
        x,
        words.view(torch.int16),
        scales.view(torch.int32),
        sums,
        num_rows,
        num_out,
        num_pairs,
        width,
        x.stride(0),
        per_part,
        bits_of(words),
        outputs,
        rows,
        pairs,
        STAGES,
        width % PAIR == 0,
        not triton.knobs.runtime.interpret,
        num_warps=num_warps,
        **early(x),
    )
    return sums[0] if bare else _finish(sums, x.dtype, bias, residual, activation, gated)


def scratch(device: torch.device) -> Tensor:
    """Where matrices are widened, one part after the other, by all products of many rows on the device: these follow
    each other on one stream. It never moves, since recorded steps know its address."""
    if device not in _scratch:
        _scratch[device] = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    return _scratch[device]


def _many_rows(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_out: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
) -> Tensor:
    num_rows, width = x.shape
    room = scratch(x.device).view(x.dtype)
    at_once = max(1, len(room) // width // PANEL) * PANEL
    sums = torch.empty((1, num_rows, num_out), dtype=x.dtype, device=x.device)
    for first in range(0, num_out, at_once):
        part = slice(first, min(first + at_once, num_out))
        weight = room[: (part.stop - first) * width].view(-1, width)
        panels = slice(first // PANEL, cdiv(part.stop, PANEL))
        widen(weight, words[panels], scales[panels])
        torch.mm(x, weight.t(), out=sums[0, :, part])
    bare = not gated and bias is None and residual is None and activation is None
    return sums[0] if bare else _finish(sums, x.dtype, bias, residual, activation, gated)


def _takes_tile(x: Tensor, words: Tensor, num_out: int) -> bool:
    """Whether even one row is faster with tensor cores: it is with 4 bits, which take long to become floats, and a
    weight beyond what counts as large."""
    return bits_of(words) == 4 and num_out * x.shape[1] > LARGE and x.itemsize == 2


@int_product.impl("cuda", exact=False)
def _body(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_out: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """One row by a kernel that takes in what stands before and after the product, few by one that widens weights on
    their way to the tensor cores, many by cuBLAS with weights widened before. Where one gives way to the next was
    measured on an H200, roughly."""
    is_large = num_out * x.shape[1] >= LARGE
    is_one = x.shape[0] == 1 and x.is_contiguous() and not _takes_tile(x, words, num_out)
    if eps > 0 and (not is_one or (is_large and norm is not None)):  # many programs would read a norm's weights again
        x, norm, eps = normed(x, norm, eps), None, 0.0
    if is_one:
        return _one_row(x, words, scales, num_out, bias, residual, activation, gated, norm, eps)
    x = x if x.stride(1) == 1 else x.contiguous()
    if not x.shape[0]:
        return x.new_empty((0, num_out // 2 if gated else num_out))
    few = FEW if is_large else FEW // 2
    multiply = _few_rows if x.shape[0] <= few and x.dtype != torch.float32 else _many_rows
    return multiply(x, words, scales, num_out, bias, residual, activation, gated)
