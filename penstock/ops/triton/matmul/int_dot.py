"""GEMV of one row with integer codes by integer dot products. Inputs become 16-bit integers with a scale per 32, so
that four codes and four inputs take two instructions; a code is never converted to a float."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.int_product import PANEL, bits_of, sets_of
from penstock.ops.triton.elementwise import activate
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.epilogue import apply_epilogue, epilogue_args
from penstock.ops.triton.matmul.int_rows import load_scales, view_scales
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import DOT_GROUPS, int_dot_shape

# 16 inputs, quantized: 4 words of upper bytes, 4 of lower ones, two totals, the scale. The 8 words of two such units
# stand for 32 inputs; word j has the inputs 2j, 16 + 2j, 2j + 1 and 17 + 2j, as the words of a weight have their codes.
# The totals are those of bytes 0 and 2 and of bytes 1 and 3.
UNIT = 16
_UNIT, _LOWER, _TOTALS = tl.constexpr(UNIT), tl.constexpr(4), tl.constexpr(8)
_LARGEST = tl.constexpr(32767.0)
# Four words of codes $1 … $4 times upper bytes $5 … $8 and lower ones $9 … $12.
_DOT = tl.constexpr(
    "{ .reg .s32 a; dp4a.u32.s32 a, $1, $5, 0; "
    + " ".join(f"dp4a.u32.s32 a, ${i}, ${i + 4}, a;" for i in (2, 3, 4))
    + " shl.b32 a, a, 8; "
    + " ".join(f"dp4a.u32.u32 a, ${i}, ${i + 8}, a;" for i in (1, 2, 3, 4))
    + " mov.b32 $0, a; }"
)
_PICK = tl.constexpr(("prmt.b32 $0, $1, $2, 0x6240;", "prmt.b32 $0, $1, $2, 0x7351;"))
_FIRST, _SECOND = tl.constexpr(0x00FF00FF), tl.constexpr(-0xFF0100)  # bytes of the first 16 inputs and of the others


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _pack_bytes(values, GROUPS: tl.constexpr):
    """Pack values[G, 32], four neighbours to a word."""
    values = tl.reshape(values & 255, (GROUPS, 8, 4))
    return tl.sum(values << (8 * tl.arange(0, 4))[None, None, :], 2)


@triton.jit
def _quantize_inputs(
    x, norm, out, width, eps, NORMED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Norm a row and quantize GROUPS groups of it. NaN and infinity pass into the scale."""
    wait_for_previous(PDL)
    factor = 1.0
    if NORMED:
        at = tl.arange(0, BLOCK)
        row = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(row * row) / width + eps)
    group, k = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, 32)
    at = group[:, None] * 32 + (k // 4 * 2 + k % 4 // 2 + k % 2 * 16)[None, :]
    y = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
    if norm is not None:
        y *= tl.load(norm + at, mask=at < width, other=0.0).to(tl.float32)
    largest = tl.reduce(tl.abs(y), 1, _maximum)
    inverse = tl.where(largest == 0.0, 0.0, _LARGEST / largest)
    codes = tl.floor(y * inverse[:, None] + 0.5).to(tl.int32)
    place = out + (group[:, None] * 2 + (tl.arange(0, 8) // 4)[None, :]) * _UNIT + (tl.arange(0, 8) % 4)[None, :]
    tl.store(place, _pack_bytes(codes >> 8, GROUPS))
    tl.store(place + _LOWER, _pack_bytes(codes, GROUPS))
    i = tl.arange(0, 4)
    totals = tl.reshape(tl.sum(tl.reshape(codes, (GROUPS, 2, 8, 2)), 2), (GROUPS, 4))
    tl.store(out + (group[:, None] * 2 + (i // 2)[None, :]) * _UNIT + _TOTALS + (i % 2)[None, :], totals)
    scale = (largest * (factor / _LARGEST)).to(tl.int32, bitcast=True)
    tl.store(out + group * (2 * _UNIT) + _TOTALS + 2, scale)
    tl.store(out + group * (2 * _UNIT) + _UNIT + _TOTALS + 2, scale)


@triton.jit
def _split_units(values):
    """Return the four words of each unit apart."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0] // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _dot_word(codes, upper, lower):
    y = codes * 0
    for b in tl.static_range(4):
        high = (upper << (24 - 8 * b)) >> 24
        y += ((codes >> 8 * b) & 255) * (high * 256 + ((lower >> 8 * b) & 255))
    return y


@triton.jit
def _dot_units(w, upper, lower, ASM: tl.constexpr):
    """Multiply units of codes with units of inputs: four words of four codes each."""
    if ASM:
        y = tl.inline_asm_elementwise(
            _DOT,
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w[0], w[1], w[2], w[3], upper[0], upper[1], upper[2], upper[3], lower[0], lower[1], lower[2], lower[3]],
            tl.int32,
            True,
            1,
        )
    else:
        y = _dot_word(w[0], upper[0], lower[0]) + _dot_word(w[1], upper[1], lower[1])
        y += _dot_word(w[2], upper[2], lower[2]) + _dot_word(w[3], upper[3], lower[3])
    return y


@triton.jit
def _pick_codes(w, g: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Return the codes of group g of a word's inputs, a byte each."""
    if BITS == 8:
        y = w
    elif ASM:
        low, high = w & 0x0F0F0F0F, (w >> 4) & 0x0F0F0F0F
        y = tl.inline_asm_elementwise(_PICK[g], "=r,r,r", [low, high], tl.int32, True, 1)
    else:
        y = ((w >> 8 * g) & 0x000F000F) | ((w >> 8 * g << 4) & 0x0F000F00)
    return y


@triton.jit
def _load_panels(place, up_place, some, TWO: tl.constexpr):
    w = tl.load(place, mask=some, other=0, eviction_policy="evict_first")
    u = w
    if TWO:
        u = tl.load(up_place, mask=some, other=0, eviction_policy="evict_first")
    return w, u


@triton.jit
def _load_inputs(at, there):
    """Load upper and lower bytes, and of each unit both totals and the scale."""
    upper, lower = tl.load(at, mask=there, other=0), tl.load(at + _LOWER, mask=there, other=0)
    first, second, bits, _ = _split_units(tl.load(at + _TOTALS, mask=there, other=0))
    return upper, lower, first, second, bits.to(tl.float32, bitcast=True)


@triton.jit
def _add_dots(
    sums, w, given, scales, known, g: tl.constexpr, BITS: tl.constexpr, SETS: tl.constexpr, ASM: tl.constexpr
):
    """Add the products of words w[N] with group g of their inputs, as `_load_inputs` gives them, to sums[N/4]."""
    upper, lower, first, second, input_scale = given
    PARTS: tl.constexpr = 2 if SETS == 4 else 1  # of a group, each with a scale
    codes = _split_units(_pick_codes(w, g, BITS, ASM))
    for part in tl.static_range(PARTS):
        a, b, total = upper, lower, first + second
        if PARTS == 2:
            if part == 0:
                a, b, total = upper & _FIRST, lower & _FIRST, first
            else:
                a, b, total = upper & _SECOND, lower & _SECOND, second
        dots = _dot_units(codes, _split_units(a), _split_units(b), ASM)
        if BITS == 8:
            dots -= 128 * total
        scale, minimum = load_scales(scales + (PARTS * g + part) * 8, known, SETS)
        y = scale * dots.to(tl.float32)
        if SETS > 0:
            y += minimum * total.to(tl.float32)
        sums += input_scale * y
    return sums


@triton.jit
def _find_scales(q, OWN: tl.constexpr, SETS: tl.constexpr):
    """Return where the first scales of a panel's units q lie, of pairs of OWN words an output."""
    pair, unit, row = q // (2 * OWN), q % (OWN // 4), q // (OWN // 4) % 8
    if SETS == 0:
        at = pair * 16 + row * 2 + unit // 2
    else:
        at = pair * (8 * SETS) + unit // 2 * (4 * SETS) + row
    return at


@triton.jit
def _sum_outputs(sums, PAIRS: tl.constexpr, OWN: tl.constexpr):
    """Return the sums of a panel's 8 outputs."""
    return tl.sum(tl.sum(tl.reshape(sums, (PAIRS, 8, OWN // 4)), 2), 0)


@triton.jit
def _store_panel(y, up, epilogue, out, panel, num_out, GATED: tl.constexpr, KIND: tl.constexpr):
    n = panel * 8 + tl.arange(0, 8)
    own = tl.minimum(n, num_out - 1)
    y = apply_epilogue(y, up, epilogue, own, None, own, None, num_out, GATED, KIND, "")
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < num_out)


@triton.jit
def _int_dots(
    inputs,
    words,
    scales,
    out,
    epilogue,
    num_out,
    num_pairs,
    BITS: tl.constexpr,
    SETS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    TWO: tl.constexpr,
    PAIRS: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One quantized row times the 8 outputs of a panel, or of TWO, PAIRS pairs at a time; if GATED the second are the
    ups. Threads take a panel's words as they lie, so that a warp reads whole lines. Weights are read one block ahead,
    the first before waiting for inputs."""
    GROUPS: tl.constexpr = 8 // BITS  # of a span
    OWN: tl.constexpr = 2 * BITS  # words of an output's pair
    SCALES: tl.constexpr = 8 * SETS if SETS else 16  # of a panel's pair
    panel, last = tl.program_id(0).to(tl.int64), tl.cdiv(num_out, 8) - 1
    up_panel = panel + num_out // 8
    if TWO and not GATED:
        panel = 2 * panel
        up_panel = tl.minimum(panel + 1, last)
    e, q = tl.arange(0, PAIRS * 8 * OWN), tl.arange(0, PAIRS * 2 * OWN)
    place, up_place = words + panel * num_pairs * (8 * OWN) + e, words + up_panel * num_pairs * (8 * OWN) + e
    scale_at = _find_scales(q, OWN, SETS)
    own, up_own = scales + panel * num_pairs * SCALES + scale_at, scales + up_panel * num_pairs * SCALES + scale_at
    input_unit = (e // (8 * OWN) * (OWN // 4 * GROUPS) + e % OWN // 8 * (2 * GROUPS) + e % 8 // 4) * _UNIT + e % 4
    input_unit = tl.max_contiguous(tl.multiple_of(input_unit, 4), 4)
    some = e // (8 * OWN) < num_pairs
    w, u = _load_panels(place, up_place, some, TWO)
    wait_for_previous(PDL)
    sums, ups = tl.zeros((PAIRS * 2 * OWN,), tl.float32), tl.zeros((PAIRS * 2 * OWN,), tl.float32)
    for start in range(0, num_pairs if AHEAD else PAIRS, PAIRS):
        next_w, next_u = w, u
        if AHEAD:
            some = start + PAIRS + e // (8 * OWN) < num_pairs
            further = (start + PAIRS) * (8 * OWN)
            next_w, next_u = _load_panels(place + further, up_place + further, some, TWO)
        there, known = start + e // (8 * OWN) < num_pairs, start + q // (2 * OWN) < num_pairs
        for g in tl.static_range(GROUPS):
            at = inputs + start * (OWN // 4 * GROUPS * _UNIT) + input_unit + 2 * g * _UNIT
            given = _load_inputs(at, there)
            sums = _add_dots(sums, w, given, own + start * SCALES, known, g, BITS, SETS, ASM)
            if TWO:
                ups = _add_dots(ups, u, given, up_own + start * SCALES, known, g, BITS, SETS, ASM)
        w, u = next_w, next_u
    y, up = _sum_outputs(sums, PAIRS, OWN), _sum_outputs(ups, PAIRS, OWN)
    _store_panel(y, up, epilogue, out, panel, num_out, GATED, KIND)
    if TWO and not GATED:
        _store_panel(up, up, epilogue, out, up_panel, num_out, False, KIND)


def quantize_inputs(x: Tensor, num_pairs: int, norm: Tensor | None, eps: float) -> Tensor:
    """Norm the only row of x and quantize it into units [U, 16]."""
    num_groups = cdiv(2 * num_pairs, DOT_GROUPS) * DOT_GROUPS
    out = torch.empty((2 * num_groups, UNIT), dtype=torch.int32, device=x.device)
    _quantize_inputs[(num_groups // DOT_GROUPS,)](
        x, norm, out, x.shape[1], eps, eps > 0, DOT_GROUPS, power_of_2(x.shape[1]), num_warps=4, **pdl_options(x)
    )
    return out


def int_dots(
    x: Tensor, words: Tensor, scales: Tensor, num_out: int, epilogue: Epilogue, norm: Tensor | None, eps: float
) -> Tensor:
    """Multiply one row, as `int_gemv` does."""
    if epilogue.gated and epilogue.activation is not None and num_out % (2 * PANEL):  # gates and ups in one panel
        y = int_dots(x, words, scales, num_out, Epilogue(epilogue.bias), norm, eps)
        y = activate(y, epilogue.activation, gated=True)
        return y if epilogue.residual is None else epilogue.residual.add_(y)
    num_results, bits, num_pairs = epilogue.num_results(num_out), bits_of(words), words.shape[1]
    inputs = quantize_inputs(x, num_pairs, norm, eps)
    out = torch.empty((1, num_results), dtype=x.dtype, device=x.device)
    shape = int_dot_shape(num_results, num_pairs, bits, epilogue.gated)
    num_panels = cdiv(num_results, PANEL)
    _int_dots[(cdiv(num_panels, 2) if shape.has_two_panels and not epilogue.gated else num_panels,)](
        inputs,
        words,
        view_scales(scales),
        out,
        epilogue_args(epilogue),
        num_results,
        num_pairs,
        bits,
        sets_of(scales),
        epilogue.gated,
        epilogue.activation or "",
        shape.has_two_panels,
        shape.num_pairs,
        num_pairs > shape.num_pairs,
        not triton.knobs.runtime.interpret,
        num_warps=shape.num_warps,
        **pdl_options(x),
    )
    return out
