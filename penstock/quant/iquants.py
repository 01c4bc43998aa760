"""GGUF tensor types whose values lie on grids or in tables: bytes [n, block_bytes] to float32 [n, block_size].

Byte layouts, all little endian; `d` is a float16 that scales the block, `grid` the lower bits of points of a grid,
a `scale` of s means 2s + 1, and seven `sign` bits are those of seven values, the eighth making their number even:
IQ2_XXS d (grid[4] sign,scale[4])[8] · IQ2_XS d grid,sign[64] scales[8] · IQ2_S d grid[32] sign[32] high[8] scales[8] ·
IQ3_XXS d grid[64] sign,scale[32] · IQ3_S d grid[64] high[8] sign[32] scales[4] ·
IQ1_S d grid[32] high,scale,delta[16] · IQ1_M grid[32] high,delta[16] scales,d[8] · TQ1_0 fives[48] fours[4] d ·
TQ2_0 codes[64] d · MXFP4 exponent codes[16] · NVFP4 scales[4] codes[32].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ops.matmul.levels import LEVELS as TABLES
from penstock.quant.grids import grid_points

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

LEVELS = {name: np.array(levels, dtype=np.float32) for name, levels in TABLES.items()}
EIGHTH = np.float32(0.125)


def _f16(stored: Bytes) -> Floats:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)


def _u16(stored: Bytes) -> NDArray[np.uint16]:
    return np.ascontiguousarray(stored).view("<u2")


def _u32(stored: Bytes) -> NDArray[np.uint32]:
    return np.ascontiguousarray(stored).view("<u4")


def _nibbles(stored: Bytes) -> Bytes:
    """Unpack bytes [n, w] to 4-bit values [n, 2w], the low half of each byte first."""
    return np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1).reshape(len(stored), -1)


def _odd(scales: NDArray[np.unsignedinteger]) -> Floats:
    return 2 * scales.astype(np.float32) + 1


def _bits(stored: Bytes) -> Bytes:
    return np.unpackbits(stored, axis=-1, bitorder="little")


def _even_signs(seven: NDArray[np.unsignedinteger]) -> Bytes:
    """Give seven sign bits [...] their eighth: bytes of eight, whose number of ones is even."""
    seven = seven.astype(np.uint8)
    parity = np.unpackbits(seven[..., None], axis=-1).sum(axis=-1, dtype=np.uint8) & np.uint8(1)
    result: Bytes = seven | parity << np.uint8(7)
    return result


def _sign(points: Bytes, signs: Bytes) -> Bytes:
    """Combine digits [n, …] and sign bits [n, 256] to 4-bit codes [n, 256]."""
    result: Bytes = points.reshape(len(points), -1) | signs << np.uint8(3)
    return result


def _scale(scale: Floats, codes: Bytes, table: str) -> Floats:
    """Multiply scales [n, g] with the levels of codes [n, w], w / g codes for each."""
    levels = LEVELS[table][codes].reshape(len(codes), scale.shape[1], -1)
    result: Floats = (scale[..., None] * levels).reshape(len(codes), -1)
    return result


class Points(NamedTuple):
    """Blocks of 256 values as codes of a table, each times d · (2s + 1), and the table's own factor."""

    table: str
    codes: Bytes  # [n, 256], of 4 bits
    scales: NDArray[np.unsignedinteger]  # [n, g]: s of as many neighbours each
    d: Bytes  # [n, 2], a float16

    def widen(self) -> Floats:
        return _scale(_f16(self.d) * FACTORS[self.table] * _odd(self.scales), self.codes, self.table)


FACTORS = {"IQ2": EIGHTH, "IQ3_XXS": np.float32(0.25), "IQ3_S": np.float32(1), "IQ1": EIGHTH}


def iq2_xxs(stored: Bytes) -> Points:
    words = _u32(stored[:, 2:]).reshape(len(stored), 8, 2)
    points = grid_points("IQ2_XXS")[np.ascontiguousarray(words[..., 0]).view(np.uint8)]
    seven = words[..., 1:] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    signs = _bits(_even_signs(seven).reshape(len(stored), -1))
    return Points("IQ2", _sign(points, signs), words[..., 1] >> np.uint32(28), stored[:, :2])


def iq2_xs(stored: Bytes) -> Points:
    words = _u16(stored[:, 2:66])
    signs = _bits(_even_signs(words >> np.uint16(9)))
    codes = _sign(grid_points("IQ2_XS")[words & np.uint16(511)], signs)
    return Points("IQ2", codes, _nibbles(stored[:, 66:]), stored[:, :2])


def _with_high(low: Bytes, high: Bytes, bits: int) -> NDArray[np.uint16]:
    """Combine bytes [n, w] with further bits: `bits` of them for each, 8 / bits in each byte of `high`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    upper = (high[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(low), -1)
    result: NDArray[np.uint16] = low | upper.astype(np.uint16) << np.uint16(8)
    return result


def iq2_s(stored: Bytes) -> Points:
    points = grid_points("IQ2_S")[_with_high(stored[:, 2:34], stored[:, 66:74], 2)]
    return Points("IQ2", _sign(points, _bits(stored[:, 34:66])), _nibbles(stored[:, 74:]), stored[:, :2])


def iq3_xxs(stored: Bytes) -> Points:
    words = _u32(stored[:, 66:])
    seven = words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    signs = _bits(_even_signs(seven).reshape(len(stored), -1))
    codes = _sign(grid_points("IQ3_XXS")[stored[:, 2:66]], signs)
    return Points("IQ3_XXS", codes, words >> np.uint32(28), stored[:, :2])


def iq3_s(stored: Bytes) -> Points:
    points = grid_points("IQ3_S")[_with_high(stored[:, 2:66], stored[:, 66:74], 1)]
    return Points("IQ3_S", _sign(points, _bits(stored[:, 74:106])), _nibbles(stored[:, 106:]), stored[:, :2])


def iq1_s(stored: Bytes) -> Points:
    words = _u16(stored[:, 34:])
    upper = words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
    points = grid_points("IQ1_S")[stored[:, 2:34] | upper.reshape(len(stored), -1) << np.uint16(8)]
    below = np.repeat((words >> np.uint16(15)).astype(np.uint8), 32, axis=1)
    return Points("IQ1", _sign(points, below), words >> np.uint16(12) & np.uint16(7), stored[:, :2])


def iq1_m(stored: Bytes) -> Points:
    high, words = _nibbles(stored[:, 32:48]), _u16(stored[:, 48:])
    points = grid_points("IQ1_S")[stored[:, :32] | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8)]
    below = np.repeat(high >> np.uint8(3), 8, axis=1)
    d = np.bitwise_or.reduce((words >> np.uint16(12)) << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    scales = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)).reshape(len(stored), -1)
    return Points("IQ1", _sign(points, below), scales, d[:, None].view(np.uint8))


class Ternary(NamedTuple):
    """Blocks of 256 values, each d times its code less one."""

    codes: Bytes  # [n, 256]
    d: Bytes  # [n, 2], a float16

    def widen(self) -> Floats:
        result: Floats = _f16(self.d) * (self.codes.astype(np.float32) - np.float32(1))
        return result


def tq1_0(stored: Bytes) -> Ternary:
    """Digits in base 3, five or four to a byte, are the upper bits of the byte times a power of 3."""
    runs = []
    for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = 3 ** np.arange(digits, dtype=np.uint8)[:, None]
        shifted = stored[:, None, begin:end] * powers.astype(np.uint8)  # modulo 256
        runs.append(((shifted.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)).reshape(len(stored), -1))
    return Ternary(np.concatenate(runs, axis=1).astype(np.uint8), stored[:, 52:])


def tq2_0(stored: Bytes) -> Ternary:
    packed = stored[:, :64].reshape(len(stored), 2, 1, 32)
    codes = packed >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    return Ternary(codes.reshape(len(stored), -1), stored[:, 64:])


def half_powers(exponents: Bytes) -> Floats:
    """Return 2^(exponent − 128): half of what an exponent of 8 bits means, since the levels are doubled."""
    bits = np.where(exponents < 2, np.uint32(0x00200000) << exponents, (exponents - np.uint32(1)) << np.uint32(23))
    result: Floats = bits.astype(np.uint32).view(np.float32)
    return result


def mxfp4(stored: Bytes) -> Floats:
    codes = np.concatenate([stored[:, 1:] & np.uint8(15), stored[:, 1:] >> np.uint8(4)], axis=-1)
    return _scale(half_powers(stored[:, :1]), codes, "FP4")


def half_e4m3(stored: Bytes) -> Floats:
    """Return half of floats of 8 bits without a sign; 127 means zero."""
    exponent = (stored >> np.uint8(3) & np.uint8(15)).astype(np.int32)
    fraction = (stored & np.uint8(7)).astype(np.float32)
    value = np.where(exponent == 0, fraction, fraction + 8) * np.exp2(np.maximum(exponent, 1) - np.float32(11))
    result: Floats = np.where(stored == 127, 0, value).astype(np.float32)
    return result


class HalfGroups(NamedTuple):
    """Blocks of 64 values as codes of doubled FP4 levels, with a scale for each 16."""

    codes: Bytes  # [n, 64]
    scales: Floats  # [n, 4]

    def widen(self) -> Floats:
        return _scale(self.scales, self.codes, "FP4")


def nvfp4(stored: Bytes) -> HalfGroups:
    packed = stored[:, 4:].reshape(len(stored), 4, 8)
    codes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(len(stored), 64)
    return HalfGroups(codes, half_e4m3(stored[:, :4]))
