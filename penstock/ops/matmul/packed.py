"""Weights as integer codes with scales: the meaning of the planes, whose bytes cpu/csrc/packed/layout.h lays out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.matmul.levels import FLOAT_LEVELS, INTEGER_LEVELS
from penstock.ops.pages import make_room

GROUP = 32  # inputs that are rounded and multiplied together
LANES = 16  # outputs side by side in a panel
SUPER = 8  # groups that share a super-scale


@dataclass(frozen=True)
class Format:
    """A weight is scale · (code − offset − zero) + minimum, with levels scale · level[code].

    With `whole` scales these are float32, otherwise float16 or a super-scale times integers.
    """

    number: int  # as in with_format of packed/layout.h
    bits: int
    offset: int = 0
    minimum: bool = False
    scales: int = 1  # per group
    supers: bool = False  # scales and minimums are int8 times a float16 for every 8 groups
    levels: str = ""  # the table of FLOAT_LEVELS
    zeros: bool = False  # int8
    whole: bool = False

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes of each plane: per panel and group, `supers` per panel and 8 groups."""
        sets = 2 if self.minimum else 1
        return {
            "codes": 512 if self.bits == 8 else 256,
            "high": {5: 64, 6: 128}.get(self.bits, 0),
            "scales": LANES * (sets * self.scales * (1 if self.supers else 4 if self.whole else 2) + self.zeros),
            "supers": 2 * LANES * sets if self.supers else 0,
        }


FORMATS = {
    "Q4_0": Format(0, 4, offset=8),
    "Q4_1": Format(1, 4, minimum=True),
    "Q5_0": Format(2, 5, offset=16),
    "Q5_1": Format(3, 5, minimum=True),
    "Q8_0": Format(4, 8, offset=128),
    "Q2_K": Format(5, 4, minimum=True, scales=2, supers=True),
    "Q3_K": Format(6, 4, offset=4, scales=2, supers=True),
    "Q4_K": Format(7, 4, minimum=True, supers=True),
    "Q5_K": Format(8, 5, minimum=True, supers=True),
    "Q6_K": Format(9, 6, offset=32, scales=2, supers=True),
    "IQ4_NL": Format(10, 4, levels="IQ4"),
    "IQ4_XS": Format(11, 4, supers=True, levels="IQ4"),
    "U4_F16": Format(12, 4, zeros=True),
    "U4_F32": Format(13, 4, zeros=True, whole=True),
    "S8_F32": Format(14, 8, offset=128, whole=True),
    "U8_F32": Format(15, 8, offset=128, zeros=True, whole=True),
    "MXFP4": Format(16, 4, levels="FP4"),
    "NF4": Format(17, 4, levels="NF4", whole=True),
    "IQ2": Format(18, 4, scales=2, supers=True, levels="IQ2"),
    "IQ3_XXS": Format(19, 4, scales=2, supers=True, levels="IQ3_XXS"),
    "IQ3_S": Format(20, 4, supers=True, levels="IQ3_S"),
    "IQ1": Format(21, 4, scales=2, supers=True, levels="IQ1"),
    "NVFP4": Format(22, 4, scales=2, whole=True, levels="FP4"),
    "BNB_FP4": Format(23, 4, whole=True, levels="BNB_FP4"),
    "U4_MIN": Format(24, 4, minimum=True, whole=True),
}


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [O, C] as planes of bytes, each [panels, groups (or super-groups), bytes]."""

    format: Format
    num_out: int
    width: int
    codes: Tensor
    high: Tensor
    scales: Tensor
    supers: Tensor

    @classmethod
    def empty(cls, format: Format, num_out: int, width: int) -> PackedWeight:
        """Room for the matrix, to be written."""
        panels, groups = -(-num_out // LANES), -(-width // GROUP)
        planes = {
            name: make_room((panels, -(-groups // SUPER) if name == "supers" else groups, size), torch.uint8)
            for name, size in format.plane_bytes.items()
        }
        if num_out % LANES:
            for plane in planes.values():
                plane[-1].zero_()  # outputs that fill up the last panel
        return cls(format, num_out, width, **planes)

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in (self.codes, self.high, self.scales, self.supers))

    def to(self, device: torch.device) -> PackedWeight:
        """Move the planes to a device."""
        planes = (plane.to(device) for plane in (self.codes, self.high, self.scales, self.supers))
        return PackedWeight(self.format, self.num_out, self.width, *planes)

    def unpack(self, integers: bool = False) -> Tensor:
        """Return the exact values of the stored format, [O, C] float32; with `integers` the levels as kernels multiply
        them by rounded activations."""
        panels, groups, _ = self.codes.shape
        scale, more = _scales(self)
        codes = _codes(self, integers)
        if self.format.zeros:
            assert more is not None
            value = (codes - more) * scale
        else:
            value = codes * scale if more is None else codes * scale + more
        rows = value.permute(0, 3, 1, 2, 4).reshape(panels * LANES, groups * GROUP)
        return rows[: self.num_out, : self.width].contiguous()


def unpack_groups(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Unpack to codes [O, G, 32], their offset taken away or as levels, and scales, and minimums or zeros, of both
    halves of groups [O, G, 2], all float32."""
    scale, more = _scales(weight)

    def order(values: Tensor) -> Tensor:
        panels, groups, steps, lanes, size = values.shape
        rows = values.permute(0, 3, 1, 2, 4).reshape(panels * lanes, groups, steps * size)
        return rows[: weight.num_out]

    def halve(values: Tensor) -> Tensor:
        each = order(values)
        return each[..., :: each.shape[2] // 2] if each.shape[2] > 1 else each.expand(-1, -1, 2)

    return order(_codes(weight, False)), halve(scale), None if more is None else halve(more)


def _codes(weight: PackedWeight, integers: bool) -> Tensor:
    """[panels, groups, quads, lanes, 4] float32, the offset taken away."""
    format, (panels, groups, _) = weight.format, weight.codes.shape
    if format.bits == 8:
        codes = weight.codes.view(panels, groups, 8, 64).int()
    else:
        both = weight.codes.view(panels, groups, 4, 1, 64).int()
        codes = torch.cat([both & 15, both >> 4], dim=3).view(panels, groups, 8, 64)
    if format.bits == 5:
        codes = (
            codes
            | ((weight.high.view(panels, groups, 1, 64).int() >> torch.arange(8, device=codes.device).view(8, 1)) & 1)
            << 4
        )
    if format.bits == 6:
        upper = weight.high.view(panels, groups, 2, 1, 64).int() >> torch.arange(0, 8, 2, device=codes.device).view(
            4, 1
        )
        codes = codes | (upper.reshape(panels, groups, 8, 64) & 3) << 4
    if format.levels:
        table = (INTEGER_LEVELS if integers else FLOAT_LEVELS)[format.levels]
        return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes].view(panels, groups, 8, LANES, 4)
    return (codes - format.offset).float().view(panels, groups, 8, LANES, 4)


def _scales(weight: PackedWeight) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums or zeros [panels, groups, quads, lanes, 1], float32."""
    format, (panels, groups, _) = weight.format, weight.codes.shape
    if format.zeros:
        scale, zero = weight.scales[..., :-LANES].contiguous(), weight.scales[..., -LANES:].view(torch.int8).float()
        whole = scale.view(torch.float32 if format.whole else torch.float16).float()
        return whole.view(panels, groups, 1, LANES, 1), zero.view(panels, groups, 1, LANES, 1)
    stored = weight.scales.view(
        torch.int8 if format.supers else torch.float32 if format.whole else torch.float16
    ).float()
    stored = stored.view(panels, groups, format.scales, -1, LANES)
    if format.supers:
        supers = weight.supers.view(torch.float16).float().view(panels, -1, 1, stored.shape[3], LANES)
        stored = stored * supers.repeat_interleave(SUPER, dim=1)[:, :groups]
    sets = stored.repeat_interleave(8 // format.scales, dim=2).unsqueeze(-1)
    return sets[:, :, :, 0], sets[:, :, :, 1] if format.minimum else None


def pack_planes(
    format: Format, codes: Tensor, entries: Sequence[Tensor], supers: Sequence[Tensor] = ()
) -> PackedWeight:
    """Pack codes [O, C] uint8. `entries` [O, ceil(C/32)] are what each group has in this order: the scale of a set, its
    minimum or int8 zero, then those of the next set. Scales and minimums are cast to the format's type; `supers`
    [O, ceil(C/256)] are the super-scale, then that of minimums."""
    num_out, width = codes.shape
    weight = PackedWeight.empty(format, num_out, width)
    panels, groups, _ = weight.codes.shape
    if (panels * LANES, groups * GROUP) != (num_out, width):
        codes = torch.nn.functional.pad(codes, (0, groups * GROUP - width, 0, panels * LANES - num_out))
    words = codes.contiguous().view(torch.int32).view(panels, LANES, groups, 8).permute(0, 2, 3, 1)
    if format.bits == 4:
        words = words[:, :, 0::2] | words[:, :, 1::2] << 4
    weight.codes.copy_(words.contiguous().view(torch.uint8).view(weight.codes.shape))
    kind = torch.int8 if format.supers else torch.float32 if format.whole else torch.float16
    typed = [entry if entry.dtype == torch.int8 else entry.to(kind) for entry in entries]
    _put_lanes(weight.scales, typed)
    _put_lanes(weight.supers, [entry.half() for entry in supers])
    return weight


def _put_lanes(plane: Tensor, entries: Sequence[Tensor]) -> None:
    """Write the bytes of entries [O, G], panel by panel, beside each other into a plane [panels, G, bytes]."""
    panels, groups, _ = plane.shape
    parts = [_lanes(entry, panels).view(torch.uint8).view(panels, groups, -1) for entry in entries]
    if parts:
        plane.copy_(torch.cat(parts, dim=-1))


def _lanes(values: Tensor, panels: int) -> Tensor:
    """Reorder [O, G] → [panels, G, lanes], padded with 0."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, panels * LANES - len(values)))
    return padded.view(panels, LANES, -1).transpose(1, 2).contiguous()
