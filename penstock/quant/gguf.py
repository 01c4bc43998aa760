"""GGUF's tensor types: how many bytes a block takes, and what numbers its bytes mean.

Bytes of a tensor come in, float32 comes out; nothing here knows files or models. The layouts of the blocks are in
`gguf_blocks` (32 values, one scale) and `gguf_superblocks` (256 values, scales of scales).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.errors import InvalidModel
from penstock.quant import gguf_blocks as blocks
from penstock.quant import gguf_superblocks as superblocks
from penstock.quant.gguf_blocks import Bytes, Floats

CHUNK_VALUES = 1 << 18  # values worked on at a time: temporaries stay within the processor's cache


@dataclass(frozen=True)
class GgmlType:
    name: str
    block_size: int  # values in a block
    block_bytes: int
    decode: Callable[[Bytes], Floats]  # [n, block_bytes] to [n, block_size]


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, blocks.f32),
    1: GgmlType("F16", 1, 2, blocks.f16),
    2: GgmlType("Q4_0", 32, 18, blocks.q4_0),
    3: GgmlType("Q4_1", 32, 20, blocks.q4_1),
    6: GgmlType("Q5_0", 32, 22, blocks.q5_0),
    7: GgmlType("Q5_1", 32, 24, blocks.q5_1),
    8: GgmlType("Q8_0", 32, 34, blocks.q8_0),
    10: GgmlType("Q2_K", 256, 84, superblocks.q2_k),
    11: GgmlType("Q3_K", 256, 110, superblocks.q3_k),
    12: GgmlType("Q4_K", 256, 144, superblocks.q4_k),
    13: GgmlType("Q5_K", 256, 176, superblocks.q5_k),
    14: GgmlType("Q6_K", 256, 210, superblocks.q6_k),
    20: GgmlType("IQ4_NL", 32, 18, blocks.iq4_nl),
    23: GgmlType("IQ4_XS", 256, 136, superblocks.iq4_xs),
    30: GgmlType("BF16", 1, 2, blocks.bf16),
}

UNSUPPORTED_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


def num_bytes(ggml_type: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this type; its rows (the last dimension) must be whole blocks."""
    kind = _known(ggml_type)
    if not shape or shape[-1] % kind.block_size:
        raise InvalidModel(f"shape {list(shape)} does not divide into {kind.name} blocks of {kind.block_size} values")
    return math.prod(shape) // kind.block_size * kind.block_bytes


def dequantize(raw: Bytes, ggml_type: int, shape: tuple[int, ...]) -> Floats:
    """The float32 values of a tensor's bytes, a chunk of blocks at a time."""
    kind = _known(ggml_type)
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


def _known(ggml_type: int) -> GgmlType:
    kind = GGML_TYPES.get(ggml_type)
    if kind is None:
        name = UNSUPPORTED_TYPES.get(ggml_type, "unknown")
        supported = ", ".join(each.name for each in GGML_TYPES.values())
        raise InvalidModel(f"GGUF tensor type {ggml_type} ({name}) is not supported; supported: {supported}")
    return kind
