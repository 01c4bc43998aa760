"""GGUF types whose values lie on grids, in tables or are ternary: packed as codes of 4 bits with the same values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.ops import FORMATS, Format, PackedWeight
from penstock.ops.matmul.packed import GROUP, LANES, pack_planes
from penstock.quant import iquants

BLOCK = 256
READ: dict[str, tuple[str, int, Callable[[np.ndarray], iquants.Points]]] = {  # packed format, bytes of a block
    "IQ2_XXS": ("IQ2", 66, iquants.iq2_xxs),
    "IQ2_XS": ("IQ2", 74, iquants.iq2_xs),
    "IQ2_S": ("IQ2", 82, iquants.iq2_s),
    "IQ3_XXS": ("IQ3_XXS", 98, iquants.iq3_xxs),
    "IQ3_S": ("IQ3_S", 110, iquants.iq3_s),
    "IQ1_S": ("IQ1", 50, iquants.iq1_s),
    "IQ1_M": ("IQ1", 56, iquants.iq1_m),
}
TERNARY = {"TQ1_0": (54, iquants.tq1_0), "TQ2_0": (66, iquants.tq2_0)}
NVFP4_BYTES = 36
ROWS = 256  # at a time; whole panels


def find_grid_format(name: str) -> Format | None:
    """Return the packed format of a type that is packed here; None for other types."""
    packed = READ[name][0] if name in READ else "Q4_0" if name in TERNARY else name if name == "NVFP4" else ""
    return FORMATS.get(packed)


def pack_grid_rows(name: str, raw: np.ndarray, width: int) -> PackedWeight:
    """Pack rows of bytes [O, bytes] of such a type."""
    format = find_grid_format(name)
    assert format is not None
    weight = PackedWeight.empty(format, len(raw), width)
    for first in range(0, len(raw), ROWS):
        part = _pack_rows(name, format, raw[first : first + ROWS], width)
        panels = slice(first // LANES, first // LANES + len(part.codes))
        for plane in ("codes", "scales", "supers"):
            getattr(weight, plane)[panels] = getattr(part, plane)
    return weight


def _pack_rows(name: str, format: Format, raw: np.ndarray, width: int) -> PackedWeight:
    if name in READ:
        points = READ[name][2](raw.reshape(-1, READ[name][1]))
        factors = torch.from_numpy(2 * points.scales.astype(np.int8) + 1).view(len(raw), -1)  # up to 31
        sets = width // GROUP * format.scales // factors.shape[1]
        spread = factors.repeat_interleave(sets, dim=1)
        entries = [spread[:, each :: format.scales] for each in range(format.scales)]
        return pack_planes(format, _rows(points.codes, len(raw)), entries, [_halves(points.d, len(raw))])
    if name in TERNARY:
        block_bytes, read = TERNARY[name]
        ternary = read(raw.reshape(-1, block_bytes))
        scale = _halves(ternary.d, len(raw)).repeat_interleave(BLOCK // GROUP, dim=1)
        return pack_planes(format, _rows(ternary.codes + np.uint8(format.offset - 1), len(raw)), [scale])
    halves = iquants.nvfp4(raw.reshape(-1, NVFP4_BYTES))
    scales = torch.from_numpy(halves.scales).view(len(raw), -1)
    return pack_planes(format, _rows(halves.codes, len(raw)), [scales[:, 0::2], scales[:, 1::2]])


def _rows(codes: np.ndarray, num_rows: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes)).view(num_rows, -1)


def _halves(stored: np.ndarray, num_rows: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(stored)).view(torch.float16).view(num_rows, -1)
