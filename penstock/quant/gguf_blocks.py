"""Plain numbers, and blocks of 32 values with one scale: bytes [n, block_bytes] to float32 [n, block_size].

Byte layouts, all little endian; `d` is a float16 scale, `m` a float16 minimum, `high` the fifth bits of the 32 codes:
Q4_0 d codes[16] · Q4_1 d m codes[16] · Q5_0 d high[4] codes[16] · Q5_1 d m high[4] codes[16] · Q8_0 d codes[32] ·
IQ4_NL d codes[16]. A byte of 4-bit codes holds value i in its low half and value i + 16 in its high half.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# The 16 levels of IQ4_NL and IQ4_XS, denser around zero.
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def f32(stored: Bytes) -> Floats:
    return np.ascontiguousarray(stored).view("<f4")


def f16(stored: Bytes) -> Floats:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)


def bf16(stored: Bytes) -> Floats:
    upper = np.ascontiguousarray(stored).view("<u2").astype(np.uint32)
    result: Floats = (upper << np.uint32(16)).view(np.float32)
    return result


def halves(codes: Bytes) -> Bytes:
    """Bytes [..., w] to 4-bit codes [..., 2w]: all low halves, then all high halves."""
    return np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)


def fields(codes: Bytes, bits: int) -> Bytes:
    """Bytes [..., w] to `bits`-wide codes [..., 8 / bits, w], lowest bits first."""
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
