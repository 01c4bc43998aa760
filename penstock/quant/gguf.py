"""GGUF tensor types: block sizes, and dequantization of bytes [n, block_bytes] to float32 [n, block_size].

Byte layouts, all little endian. Blocks of 32 values have a scale `d` and maybe a minimum `m` (float16 each); `high` are
the fifth bits of the codes: Q4_0 d codes[16] · Q4_1 d m codes[16] · Q5_0 d high[4] codes[16] ·
Q5_1 d m high[4] codes[16] · Q8_0 d codes[32] · IQ4_NL d codes[16]. A byte of 4-bit codes holds value i in its low half
and value i + 16 in its high half.

Blocks of 256 values have groups with integer scales of their own; `d` scales those and `dmin` the groups' minimums
(float16 each): Q2_K scales[16] codes[64] d dmin · Q3_K high[32] codes[64] scales[12] d ·
Q4_K d dmin scales[12] codes[128] · Q5_K d dmin scales[12] high[32] codes[128] · Q6_K low[128] high[64] scales[16] d ·
IQ4_XS d upper[2] lower[4] codes[128]. A group is 16 values (Q2_K, Q3_K, Q6_K) or 32 (Q4_K, Q5_K, IQ4_XS).
The other types are in `iquants.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidModel
from penstock.quant import iquants

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

LEVELS = iquants.LEVELS["IQ4"]  # denser around zero


def f32(stored: Bytes) -> Floats:
    return np.ascontiguousarray(stored).view("<f4")


def f16(stored: Bytes) -> Floats:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)


def bf16(stored: Bytes) -> Floats:
    upper = np.ascontiguousarray(stored).view("<u2").astype(np.uint32)
    result: Floats = (upper << np.uint32(16)).view(np.float32)
    return result


def halves(codes: Bytes) -> Bytes:
    """Unpack bytes [..., w] to 4-bit codes [..., 2w]: all low halves, then all high halves."""
    return np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)


def fields(codes: Bytes, bits: int) -> Bytes:
    """Unpack bytes [..., w] to `bits`-wide codes [..., 8 / bits, w], lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    result: Bytes = (codes[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)
    return result


def q4_0(stored: Bytes) -> Floats:
    result: Floats = f16(stored[:, :2]) * (halves(stored[:, 2:]).astype(np.float32) - np.float32(8))
    return result


def q4_1(stored: Bytes) -> Floats:
    return f16(stored[:, :2]) * halves(stored[:, 4:]) + f16(stored[:, 2:4])


def _five_bits(high: Bytes, codes: Bytes) -> Floats:
    fifth = np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)
    result: Floats = (halves(codes) | fifth).astype(np.float32)
    return result


def q5_0(stored: Bytes) -> Floats:
    result: Floats = f16(stored[:, :2]) * (_five_bits(stored[:, 2:6], stored[:, 6:]) - np.float32(16))
    return result


def q5_1(stored: Bytes) -> Floats:
    return f16(stored[:, :2]) * _five_bits(stored[:, 4:8], stored[:, 8:]) + f16(stored[:, 2:4])


def q8_0(stored: Bytes) -> Floats:
    return f16(stored[:, :2]) * stored[:, 2:].view(np.int8)


def iq4_nl(stored: Bytes) -> Floats:
    return f16(stored[:, :2]) * LEVELS[halves(stored[:, 2:])]


def _group(values: Bytes, size: int) -> Bytes:
    return values.reshape(len(values), -1, size)


def q2_k(stored: Bytes) -> Floats:
    scales, codes = stored[:, :16], stored[:, 16:80]
    scale = f16(stored[:, 80:82]) * (scales & np.uint8(15))
    minimum = f16(stored[:, 82:84]) * (scales >> np.uint8(4))
    # Each run of 32 bytes holds 128 values: the lowest two bits of all bytes first.
    values = _group(fields(_group(codes, 32), 2), 16)
    result: Floats = (scale[..., None] * values - minimum[..., None]).reshape(-1, 256)
    return result


def _signed_scales(packed: Bytes) -> Floats:
    """Unpack Q3_K's sixteen 6-bit scales, offset by 32; low four bits in bytes 0-7, upper two in bytes 8-11."""
    low = halves(packed[:, :8])
    upper = fields(packed[:, 8:], 2).reshape(-1, 16)
    result: Floats = (low | (upper << np.uint8(4))).astype(np.float32) - np.float32(32)
    return result


def q3_k(stored: Bytes) -> Floats:
    scale = f16(stored[:, 108:110]) * _signed_scales(stored[:, 96:108])
    low = _group(fields(_group(stored[:, 32:96], 32), 2), 16)
    high = _group(fields(stored[:, :32], 1), 16)  # a clear bit subtracts 4
    values = (low | (high << np.uint8(2))).astype(np.float32) - np.float32(4)
    result: Floats = (scale[..., None] * values).reshape(-1, 256)
    return result


def _scales_and_minimums(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the eight 6-bit scales and minimums of Q4_K and Q5_K.

    The first four of each are the low six bits of bytes 0-3 and 4-7, whose upper two bits belong to the last four;
    those have their low four bits in bytes 8-11, a half each.
    """
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    six, upper = np.uint8(63), np.uint8(48)
    scales = np.concatenate([first & six, (rest & np.uint8(15)) | ((first >> np.uint8(2)) & upper)], axis=-1)
    minimums = np.concatenate([second & six, (rest >> np.uint8(4)) | ((second >> np.uint8(2)) & upper)], axis=-1)
    return scales, minimums


def _affine(stored: Bytes, values: Bytes) -> Floats:
    """Apply the scales and minimums of a Q4_K or Q5_K header to values [n, 8, 32]."""
    scales, minimums = _scales_and_minimums(stored[:, 4:16])
    scale, minimum = f16(stored[:, :2]) * scales, f16(stored[:, 2:4]) * minimums
    return (scale[..., None] * values - minimum[..., None]).reshape(-1, 256)


def q4_k(stored: Bytes) -> Floats:
    return _affine(stored, _group(halves(_group(stored[:, 16:], 32)), 32))


def q5_k(stored: Bytes) -> Floats:
    low = _group(halves(_group(stored[:, 48:], 32)), 32)
    high = fields(stored[:, 16:48], 1)
    return _affine(stored, low | (high << np.uint8(4)))


def q6_k(stored: Bytes) -> Floats:
    scale = f16(stored[:, 208:210]) * stored[:, 192:208].view(np.int8)
    low = halves(_group(stored[:, :128], 64)).reshape(len(stored), 256)
    high = fields(_group(stored[:, 128:192], 32), 2).reshape(len(stored), 256)
    values = _group((low | (high << np.uint8(4))).astype(np.float32) - np.float32(32), 16)
    return (scale[..., None] * values).reshape(-1, 256)


def iq4_xs(stored: Bytes) -> Floats:
    upper = np.ascontiguousarray(stored[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    lower = np.stack([stored[:, 4:8] & np.uint8(15), stored[:, 4:8] >> np.uint8(4)], axis=-1).reshape(-1, 8)
    scales = (lower | ((upper & np.uint16(3)) << np.uint16(4))).astype(np.float32) - np.float32(32)
    values = LEVELS[halves(_group(stored[:, 8:], 16))]
    result: Floats = ((f16(stored[:, :2]) * scales)[..., None] * values).reshape(-1, 256)
    return result


CHUNK_VALUES = 1 << 18  # values per chunk: temporaries stay in the CPU cache


@dataclass(frozen=True)
class GgmlType:
    """A ggml tensor type."""

    name: str
    block_size: int  # values per block
    block_bytes: int
    decode: Callable[[Bytes], Floats]  # [n, block_bytes] to [n, block_size]


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, f32),
    1: GgmlType("F16", 1, 2, f16),
    2: GgmlType("Q4_0", 32, 18, q4_0),
    3: GgmlType("Q4_1", 32, 20, q4_1),
    6: GgmlType("Q5_0", 32, 22, q5_0),
    7: GgmlType("Q5_1", 32, 24, q5_1),
    8: GgmlType("Q8_0", 32, 34, q8_0),
    10: GgmlType("Q2_K", 256, 84, q2_k),
    11: GgmlType("Q3_K", 256, 110, q3_k),
    12: GgmlType("Q4_K", 256, 144, q4_k),
    13: GgmlType("Q5_K", 256, 176, q5_k),
    14: GgmlType("Q6_K", 256, 210, q6_k),
    16: GgmlType("IQ2_XXS", 256, 66, lambda stored: iquants.iq2_xxs(stored).widen()),
    17: GgmlType("IQ2_XS", 256, 74, lambda stored: iquants.iq2_xs(stored).widen()),
    18: GgmlType("IQ3_XXS", 256, 98, lambda stored: iquants.iq3_xxs(stored).widen()),
    19: GgmlType("IQ1_S", 256, 50, lambda stored: iquants.iq1_s(stored).widen()),
    20: GgmlType("IQ4_NL", 32, 18, iq4_nl),
    21: GgmlType("IQ3_S", 256, 110, lambda stored: iquants.iq3_s(stored).widen()),
    22: GgmlType("IQ2_S", 256, 82, lambda stored: iquants.iq2_s(stored).widen()),
    23: GgmlType("IQ4_XS", 256, 136, iq4_xs),
    29: GgmlType("IQ1_M", 256, 56, lambda stored: iquants.iq1_m(stored).widen()),
    30: GgmlType("BF16", 1, 2, bf16),
    34: GgmlType("TQ1_0", 256, 54, lambda stored: iquants.tq1_0(stored).widen()),
    35: GgmlType("TQ2_0", 256, 66, lambda stored: iquants.tq2_0(stored).widen()),
    39: GgmlType("MXFP4", 32, 17, iquants.mxfp4),
    40: GgmlType("NVFP4", 64, 36, lambda stored: iquants.nvfp4(stored).widen()),
}

UNSUPPORTED_TYPES: dict[int, str] = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}


def num_bytes(ggml_type: int, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor; its rows (the last dimension) must be whole blocks."""
    kind = _find_type(ggml_type)
    if not shape or shape[-1] % kind.block_size:
        raise InvalidModel(f"shape {list(shape)} does not divide into {kind.name} blocks of {kind.block_size} values")
    return math.prod(shape) // kind.block_size * kind.block_bytes


def dequantize(raw: Bytes, ggml_type: int, shape: tuple[int, ...]) -> Floats:
    """Dequantize to float32, a chunk of blocks at a time."""
    kind = _find_type(ggml_type)
    expected = num_bytes(ggml_type, shape)
    if raw.dtype != np.uint8 or raw.size != expected:
        raise InvalidModel(f"{kind.name} tensor of shape {list(shape)} takes {expected} bytes, not {raw.size}")
    stored = raw.reshape(-1, kind.block_bytes)
    values = np.empty((len(stored), kind.block_size), dtype=np.float32)
    step = max(1, CHUNK_VALUES // kind.block_size)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be infinite
        for start in range(0, len(stored), step):
            values[start : start + step] = kind.decode(stored[start : start + step])
    return values.reshape(shape)


def _find_type(ggml_type: int) -> GgmlType:
    kind = GGML_TYPES.get(ggml_type)
    if kind is None:
        name = UNSUPPORTED_TYPES.get(ggml_type, "unknown")
        supported = ", ".join(each.name for each in GGML_TYPES.values())
        raise InvalidModel(
            f"GGUF tensor type {ggml_type} ({name}) is not supported; use a file of one of these: {supported}"
        )
    return kind
