"""Weights as codes with scales, whatever file they came from: their exact values, and their planes on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from penstock.ops import FORMATS, Format, PackedWeight
from penstock.ops.matmul.levels import FLOAT_LEVELS
from penstock.ops.matmul.packed import GROUP, pack_planes

SCALES = 1 << 22  # compared at a time
E4M3 = "E4M3"  # as `levels`: codes are 8-bit floats, which no packed format holds


@dataclass(frozen=True)
class Coded:
    """A matrix [O, C]: value = scale · (code − zero), or scale · level[code], computed in float32 in this order.

    Columns are in groups of `group`, in the order in which they lie here, with G = ceil(C / group) scales an output;
    column c is input `order[c]`. Where groups are not of one size, `groups` names each column's.
    """

    codes: Tensor  # [O, C] uint8
    scale: Tensor  # [O, G] in any float dtype
    group: int
    zero: int | Tensor = 0  # of all, or uint8 or float32 [O, G]
    bits: int = 8
    levels: str = ""  # a table of FLOAT_LEVELS, or E4M3
    order: Tensor | None = None  # [C] int64
    groups: Tensor | None = None  # [C] int64
    transposed: bool = False  # the checkpoint's own matrix is [C, O]

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        return self.codes.shape[1]

    @cached_property
    def format(self) -> Format | None:
        """The packed format that holds exactly these values; None if there is none."""
        return FORMATS.get(self._find_format())

    @property
    def kind(self) -> Format | None:
        """Matrices of one kind can be packed together."""
        return self.format

    def _find_format(self) -> str:
        if self.groups is not None or self.levels == E4M3:
            return ""
        if self.levels == "FP4" and self.group == GROUP // 2 and self.width % GROUP == 0:
            return "NVFP4"
        if self.scale.shape[1] > 1 and self.group % GROUP:
            return ""
        is_half = is_exact_half(self.scale)
        if self.levels:
            return {"FP4": "MXFP4" if is_half else ""}.get(self.levels, self.levels)
        if self.has_fractions:
            return "U4_MIN" if self.bits <= 4 else ""
        if self.bits > 4:
            plain = "Q8_0" if is_half else "S8_F32"
            return plain if isinstance(self.zero, int) and self.zero == 128 else "U8_F32"
        if is_half and self.bits == 4 and isinstance(self.zero, int) and self.zero == 8:
            return "Q4_0"
        return "U4_F16" if is_half else "U4_F32"

    @property
    def is_float8(self) -> bool:
        return self.levels == E4M3

    @property
    def has_fractions(self) -> bool:
        """Zeros may lie between codes."""
        return not isinstance(self.zero, int) and self.zero.is_floating_point()

    def widen(self) -> Tensor:
        """Return the values [O, C] in float32, the inputs in the checkpoint's order."""
        if self.levels == E4M3:
            values = self.codes.view(torch.float8_e4m3fn).float()
        elif self.levels:
            values = torch.tensor(FLOAT_LEVELS[self.levels], dtype=torch.float32)[self.codes.long()]
        elif isinstance(self.zero, int):
            values = self.codes.float() - self.zero
        else:
            values = self.codes.float() - self._spread(self.zero.float())
        values *= self._spread(self.scale.float())
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)

    def _spread(self, entries: Tensor) -> Tensor:
        """Give each column the entry of its group: [O, G] → [O, C]; a single one stays [O, 1]."""
        if self.groups is not None:
            return entries[:, self.groups]
        return entries if entries.shape[1] == 1 else _repeat(entries, self.group, self.width)

    def take_rows(self, rows: Tensor) -> Coded:
        """Return these outputs alone, in this order."""
        zero = self.zero if isinstance(self.zero, int) else self.zero[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], zero=zero)

    def slice_rows(self, rows: range) -> Coded:
        """Return these outputs alone."""
        return self.take_rows(torch.arange(rows.start, rows.stop))

    def take_columns(self, columns: range) -> Coded | None:
        """Return these inputs alone; None unless they are whole groups, in their order."""
        if self.order is not None or self.groups is not None:
            return None
        part, groups = slice(columns.start, columns.stop), slice(None)
        if self.scale.shape[1] > 1:
            if columns.start % self.group or columns.stop % self.group:
                return None
            groups = slice(columns.start // self.group, columns.stop // self.group)
        zero = self.zero if isinstance(self.zero, int) else self.zero[:, groups]
        return replace(self, codes=self.codes[:, part], scale=self.scale[:, groups], zero=zero)


def code_floats(values: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> Coded:
    """Return 8-bit floats [O, C] with a scale: of all, of each output, or of each block of that size."""
    num_out, width = values.shape
    scale, group = scale.float(), width
    if block is not None:
        scale, group = scale[torch.arange(num_out) // block[0]], block[1]
    else:
        scale = scale.reshape(-1, 1).expand(num_out, 1)
    return Coded(values.view(torch.uint8), scale, group, levels=E4M3)


def is_exact_half(scale: Tensor) -> bool:
    """Return True if float16 holds every one of these scales."""
    if scale.dtype == torch.float16:
        return True
    return all(torch.equal(part.half().float(), part.float()) for part in torch.split(scale.flatten(), SCALES))


def _repeat(entries: Tensor, times: int, width: int) -> Tensor:
    return entries.repeat_interleave(times, dim=1)[:, :width]


def pack_matrices(parts: Sequence[Coded]) -> PackedWeight:
    """Pack matrices of one format on top of each other."""
    format, width = parts[0].format, parts[0].width
    if format is None or any(part.format != format or part.width != width for part in parts):
        raise ValueError("matrices of several formats cannot be packed together")
    num_groups = -(-width // GROUP)

    def stack(entries: Sequence[Tensor]) -> Tensor:
        spread = [
            each.expand(-1, num_groups)
            if each.shape[1] == 1
            else _repeat(each, max(1, part.group // GROUP), num_groups)
            for part, each in zip(parts, entries)
        ]
        return spread[0] if len(spread) == 1 else torch.cat(spread)

    codes = parts[0].codes if len(parts) == 1 else torch.cat([part.codes for part in parts])
    scales = [part.scale.float() if format.whole else part.scale.half() for part in parts]
    if format.scales == 2:
        return pack_planes(format, codes, [stack([each[:, half::2] for each in scales]) for half in (0, 1)])
    entries = [stack(scales)]
    if format.zeros:
        zeros = [
            torch.full((part.num_out, 1), part.zero) if isinstance(part.zero, int) else part.zero.int()
            for part in parts
        ]
        entries.append(stack([(each - format.offset).to(torch.int8) for each in zeros]))
    if format.minimum:
        entries.append(stack([-each * torch.as_tensor(part.zero) for part, each in zip(parts, scales)]))
    return pack_planes(format, codes, entries)
