"""Packed weights as the integers of a GPU: the same codes, with scales and minimums in float16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from penstock.ops import Format, OpTable, PackedWeight
from penstock.ops.matmul.int_product import PANEL, empty_ints, pack_codes, pack_scales
from penstock.ops.matmul.levels import LEVELS, UNITS
from penstock.ops.matmul.packed import LANES, unpack_groups
from penstock.quant.fp8 import blank_fp8
from penstock.quant.ints import Ints
from penstock.quant.packed import Stored, pack
from penstock.quant.permuted import pack_in_order
from penstock.quant.scheme import Scheme

VALUES = 1 << 23  # recoded at a time
MIN_LARGEST, MAX_SCALE = 2.0**-12, 65504.0  # of a matrix's scales: float16 would lose smaller ones, and has no larger


def find_layout(formats: Sequence[Format]) -> tuple[int, int] | None:
    """Return bits and sets (`ops.matmul.int_product`) that hold codes of these formats; None if none does."""
    if any(format.levels not in ("", *LEVELS) for format in formats):  # the others are no integers
        return None
    bits = 4 if all(format.bits == 4 and not format.levels for format in formats) else 8
    if any(format.scales == 2 for format in formats):
        return bits, 4
    return bits, 2 if bits == 4 or any(format.minimum or format.zeros for format in formats) else 0


def recode_matrices(
    ops: OpTable, stored: Sequence[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Scheme | None:
    """Make one weight of stored matrices on a device; None where they must be widened."""

    def make(run: Sequence[Stored], bias: Tensor | None) -> Scheme | None:
        parts = [pack(list(each)).to(device) for _, each in groupby(run, key=lambda part: part.kind)]
        return recode(ops, parts, bias, dtype)

    return pack_in_order(ops, stored, bias, make, device)


def recode(ops: OpTable, parts: Sequence[PackedWeight], bias: Tensor | None, dtype: torch.dtype) -> Ints | None:
    """Make one weight of parts that lie on top of each other, on the device of their planes; None if it would lose
    more than the rounding of its scales to float16."""
    layout = find_layout([part.format for part in parts])
    if layout is None or any(part.num_out % PANEL for part in parts[:-1]):
        return None
    bits, sets = layout
    num_out, width = sum(part.num_out for part in parts), parts[0].width
    words, scales = empty_ints(bits, num_out, width, parts[0].codes.device, sets)
    largest = torch.zeros((), device=words.device)
    first = 0
    for part in parts:
        for piece in _split(part):
            codes, both = _recode(piece, bits, sets)
            largest = torch.maximum(largest, both.abs().amax())  # NaN stays
            here = slice(first // PANEL, -(-(first + piece.num_out) // PANEL))
            words[here], scales[here] = pack_codes(codes, bits), pack_scales(both.half())
            first += piece.num_out
    if not MIN_LARGEST <= float(largest) <= MAX_SCALE:
        return None
    return Ints(ops, (num_out, width), words, scales, bias, dtype)


def _split(weight: PackedWeight) -> list[PackedWeight]:
    """Cut a weight into some panels at a time."""
    panels, at_once = len(weight.codes), max(1, VALUES // (weight.width * LANES))
    pieces = []
    for first in range(0, panels, at_once):
        part = slice(first, first + at_once)
        planes = {name: getattr(weight, name)[part] for name in ("codes", "high", "scales", "supers")}
        num_out = min(weight.num_out - first * LANES, at_once * LANES)
        pieces.append(replace(weight, num_out=num_out, **planes))
    return pieces


def _recode(weight: PackedWeight, bits: int, sets: int) -> tuple[Tensor, Tensor]:
    """Return codes [O, G, 32] and scales [O, G], or with a minimum or middle [O, G, 2], of two halves [O, G, 2, 2]."""
    format = weight.format
    codes, scale, more = unpack_groups(weight)  # codes less the offset; scale and more of each half
    unit = UNITS.get(format.levels, 1)
    codes, scale = codes * unit, scale / unit  # exact: a power of two
    if more is None:
        more = torch.zeros_like(scale)
    elif format.zeros:
        more = -scale * more
    if bits == 4:
        codes, more = codes + format.offset, more - format.offset * scale
    else:
        shift = 0 if format.levels or format.offset else 1 << format.bits - 1  # around 0, so that more is small
        codes, more = codes - shift + 128, more + shift * scale
    if sets == 0:
        return codes.to(torch.uint8), scale[..., 0]
    both = torch.stack([scale, more], -1)
    return codes.to(torch.uint8), both if sets == 4 else both[:, :, 0]


@dataclass(frozen=True)
class Codes:
    """The codes in which a GPU holds a matrix: of these packed formats, its parts', or 8-bit floats."""

    formats: tuple[Format, ...] = ()
    group: int = 0  # of 8-bit floats: inputs with one scale

    def count_bytes(self, num_out: int, width: int) -> int:
        """Return the bytes of a matrix; those of 16-bit values if it is widened."""
        scheme = self.make_blank(OpTable("cpu"), num_out, width, None, torch.bfloat16, torch.device("meta"))
        return 2 * num_out * width if scheme is None else scheme.num_bytes

    def make_blank(
        self, ops: OpTable, num_out: int, width: int, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Scheme | None:
        """Make a matrix without values; None if it is widened."""
        if self.group:
            return blank_fp8(ops, num_out, width, self.group, bias, device)
        layout = find_layout(self.formats)
        if layout is None:
            return None
        words, scales = empty_ints(layout[0], num_out, width, device, layout[1])
        return Ints(ops, (num_out, width), words, scales, bias, dtype)
