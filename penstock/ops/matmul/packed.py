"""Weights as integer codes with scales: the meaning of the planes, whose bytes cpu/csrc/packed/layout.h lays out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # inputs that are rounded and multiplied together
LANES = 16  # outputs side by side in a panel
SUPER = 8  # groups that share a super-scale
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of the IQ4 formats


@dataclass(frozen=True)
class Format:
    """A weight is scale · (code − offset) + minimum, with levels scale · LEVELS[code]."""

    number: int  # as in with_format of packed/layout.h
    bits: int
    offset: int = 0
    minimum: bool = False
    scales: int = 1  # per group
    supers: bool = False  # scales and minimums are int8 times a float16 for every 8 groups
    levels: bool = False

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes of each plane: per panel and group, `supers` per panel and 8 groups."""
        sets = 2 if self.minimum else 1
        return {
            "codes": 512 if self.bits == 8 else 256,
            "high": {5: 64, 6: 128}.get(self.bits, 0),
            "scales": LANES * sets * self.scales * (1 if self.supers else 2),
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
    "IQ4_NL": Format(10, 4, levels=True),
    "IQ4_XS": Format(11, 4, supers=True, levels=True),
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
            name: torch.empty(panels, -(-groups // SUPER) if name == "supers" else groups, size, dtype=torch.uint8)
            for name, size in format.plane_bytes.items()
        }
        if num_out % LANES:
            for plane in planes.values():
                plane[-1].zero_()  # outputs that fill up the last panel
        return cls(format, num_out, width, **planes)

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in (self.codes, self.high, self.scales, self.supers))

    def unpack(self) -> Tensor:
        """Return the exact values of the stored format, [O, C] float32."""
        panels, groups, _ = self.codes.shape
        scale, minimum = _scales(self)
        value = _codes(self).float() * scale
        if minimum is not None:
            value = value + minimum
        rows = value.permute(0, 3, 1, 2, 4).reshape(panels * LANES, groups * GROUP)
        return rows[: self.num_out, : self.width].contiguous()


def _codes(weight: PackedWeight) -> Tensor:
    """[panels, groups, quads, lanes, 4], the offset taken away."""
    format, (panels, groups, _) = weight.format, weight.codes.shape
    if format.bits == 8:
        codes = weight.codes.view(panels, groups, 8, 64).int()
    else:
        both = weight.codes.view(panels, groups, 4, 1, 64).int()
        codes = torch.cat([both & 15, both >> 4], dim=3).view(panels, groups, 8, 64)
    if format.bits == 5:
        codes = codes | ((weight.high.view(panels, groups, 1, 64).int() >> torch.arange(8).view(8, 1)) & 1) << 4
    if format.bits == 6:
        upper = weight.high.view(panels, groups, 2, 1, 64).int() >> torch.arange(0, 8, 2).view(4, 1)
        codes = codes | (upper.reshape(panels, groups, 8, 64) & 3) << 4
    codes = torch.tensor(LEVELS)[codes] if format.levels else codes - format.offset
    return codes.view(panels, groups, 8, LANES, 4)


def _scales(weight: PackedWeight) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums [panels, groups, quads, lanes, 1], float32."""
    format, (panels, groups, _) = weight.format, weight.codes.shape
    stored = weight.scales.view(torch.int8 if format.supers else torch.float16).float()
    stored = stored.view(panels, groups, format.scales, -1, LANES)
    if format.supers:
        supers = weight.supers.view(torch.float16).float().view(panels, -1, 1, stored.shape[3], LANES)
        stored = stored * supers.repeat_interleave(SUPER, dim=1)[:, :groups]
    sets = stored.repeat_interleave(8 // format.scales, dim=2).unsqueeze(-1)
    return sets[:, :, :, 0], sets[:, :, :, 1] if format.minimum else None
