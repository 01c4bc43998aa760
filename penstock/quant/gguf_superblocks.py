"""Blocks of 256 values whose groups have integer scales of their own: bytes [n, block_bytes] to float32 [n, 256].

Byte layouts, all little endian; `d` scales the groups' scales and `dmin` their minimums (float16 each):
Q2_K scales[16] codes[64] d dmin · Q3_K high[32] codes[64] scales[12] d · Q4_K d dmin scales[12] codes[128] ·
Q5_K d dmin scales[12] high[32] codes[128] · Q6_K low[128] high[64] scales[16] d ·
IQ4_XS d upper[2] lower[4] codes[128].
A group is 16 values (Q2_K, Q3_K, Q6_K) or 32 (Q4_K, Q5_K, IQ4_XS).
"""

from __future__ import annotations

import numpy as np

from penstock.quant.gguf_blocks import LEVELS, Bytes, Floats, f16, fields, halves


def _grouped(values: Bytes, size: int) -> Bytes:
    return values.reshape(len(values), -1, size)


def q2_k(stored: Bytes) -> Floats:
    scales, codes = stored[:, :16], stored[:, 16:80]
    scale = f16(stored[:, 80:82]) * (scales & np.uint8(15))
    minimum = f16(stored[:, 82:84]) * (scales >> np.uint8(4))
    # Each run of 32 bytes holds 128 values: the lowest two bits of all bytes first.
    values = _grouped(fields(_grouped(codes, 32), 2), 16)
    result: Floats = (scale[..., None] * values - minimum[..., None]).reshape(-1, 256)
    return result


def _signed_scales(packed: Bytes) -> Floats:
    """Q3_K: sixteen 6-bit scales, offset by 32; low four bits in bytes 0-7, upper two in bytes 8-11."""
    low = halves(packed[:, :8])
    upper = fields(packed[:, 8:], 2).reshape(-1, 16)
    result: Floats = (low | (upper << np.uint8(4))).astype(np.float32) - np.float32(32)
    return result


def q3_k(stored: Bytes) -> Floats:
    scale = f16(stored[:, 108:110]) * _signed_scales(stored[:, 96:108])
    low = _grouped(fields(_grouped(stored[:, 32:96], 32), 2), 16)
    high = _grouped(fields(stored[:, :32], 1), 16)  # a clear bit takes 4 away
    values = (low | (high << np.uint8(2))).astype(np.float32) - np.float32(4)
    result: Floats = (scale[..., None] * values).reshape(-1, 256)
    return result


def _scales_and_minimums(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Q4_K, Q5_K: eight 6-bit scales and minimums.

    The first four of each lie whole in the low six bits of bytes 0-3 and 4-7, whose upper two bits belong to the last
    four; those have their low four bits in bytes 8-11, a half each.
    """
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    six, upper = np.uint8(63), np.uint8(48)
    scales = np.concatenate([first & six, (rest & np.uint8(15)) | ((first >> np.uint8(2)) & upper)], axis=-1)
    minimums = np.concatenate([second & six, (rest >> np.uint8(4)) | ((second >> np.uint8(2)) & upper)], axis=-1)
    return scales, minimums


def _affine(stored: Bytes, values: Bytes) -> Floats:
    """Values [n, 8, 32] with the scales and minimums of a Q4_K or Q5_K header."""
    scales, minimums = _scales_and_minimums(stored[:, 4:16])
    scale, minimum = f16(stored[:, :2]) * scales, f16(stored[:, 2:4]) * minimums
    return (scale[..., None] * values - minimum[..., None]).reshape(-1, 256)


def q4_k(stored: Bytes) -> Floats:
    return _affine(stored, _grouped(halves(_grouped(stored[:, 16:], 32)), 32))


def q5_k(stored: Bytes) -> Floats:
    low = _grouped(halves(_grouped(stored[:, 48:], 32)), 32)
    high = fields(stored[:, 16:48], 1)
    return _affine(stored, low | (high << np.uint8(4)))


def q6_k(stored: Bytes) -> Floats:
    scale = f16(stored[:, 208:210]) * stored[:, 192:208].view(np.int8)
    low = halves(_grouped(stored[:, :128], 64)).reshape(len(stored), 256)
    high = fields(_grouped(stored[:, 128:192], 32), 2).reshape(len(stored), 256)
    values = _grouped((low | (high << np.uint8(4))).astype(np.float32) - np.float32(32), 16)
    return (scale[..., None] * values).reshape(-1, 256)


def iq4_xs(stored: Bytes) -> Floats:
    upper = np.ascontiguousarray(stored[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    lower = np.stack([stored[:, 4:8] & np.uint8(15), stored[:, 4:8] >> np.uint8(4)], axis=-1).reshape(-1, 8)
    scales = (lower | ((upper & np.uint16(3)) << np.uint16(4))).astype(np.float32) - np.float32(32)
    values = LEVELS[halves(_grouped(stored[:, 8:], 16))]
    result: Floats = ((f16(stored[:, :2]) * scales)[..., None] * values).reshape(-1, 256)
    return result
