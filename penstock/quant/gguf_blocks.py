"""Plain numbers, and blocks of 32 values with one scale: bytes [n, block_bytes] to float32 [n, block_size].

Byte layouts, all little endian; `d` is a float16 scale, `m` a float16 minimum, `high` the fifth bits of the 32 codes:
Q4_0 d codes[16] · Q4_1 d m codes[16] · Q5_0 d high[4] codes[16] · Q5_1 d m high[4] codes[16] · Q8_0 d codes[32] ·
IQ4_NL d codes[16]. A byte of 4-bit codes holds value i in its low half and value i + 16 in its high half.
"""

from __future__ import annotations

import numpy as np

# The 16 levels of IQ4_NL and IQ4_XS, denser around zero.
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def f32(stored: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stored).view("<f4")


def f16(stored: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)


def bf16(stored: np.ndarray) -> np.ndarray:
    upper = np.ascontiguousarray(stored).view("<u2").astype(np.uint32)
    return (upper << np.uint32(16)).view(np.float32)


def halves(codes: np.ndarray) -> np.ndarray:
    """Bytes [..., w] to 4-bit codes [..., 2w]: all low halves, then all high halves."""
    return np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)


def fields(codes: np.ndarray, bits: int) -> np.ndarray:
    """Bytes [..., w] to `bits`-wide codes [..., 8 / bits, w], lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (codes[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def q4_0(stored: np.ndarray) -> np.ndarray:
    return f16(stored[:, :2]) * (halves(stored[:, 2:]).astype(np.float32) - np.float32(8))


def q4_1(stored: np.ndarray) -> np.ndarray:
    return f16(stored[:, :2]) * halves(stored[:, 4:]) + f16(stored[:, 2:4])


def _five_bits(high: np.ndarray, codes: np.ndarray) -> np.ndarray:
    fifth = np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)
    return (halves(codes) | fifth).astype(np.float32)


def q5_0(stored: np.ndarray) -> np.ndarray:
    return f16(stored[:, :2]) * (_five_bits(stored[:, 2:6], stored[:, 6:]) - np.float32(16))


def q5_1(stored: np.ndarray) -> np.ndarray:
    return f16(stored[:, :2]) * _five_bits(stored[:, 4:8], stored[:, 8:]) + f16(stored[:, 2:4])


def q8_0(stored: np.ndarray) -> np.ndarray:
    return f16(stored[:, :2]) * stored[:, 2:].view(np.int8)


def iq4_nl(stored: np.ndarray) -> np.ndarray:
    return f16(stored[:, :2]) * LEVELS[halves(stored[:, 2:])]
