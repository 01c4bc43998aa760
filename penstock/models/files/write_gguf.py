"""Write a GGUF file from metadata and the bytes of tensors."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.models.files.gguf import ARRAY, BOOL, DEFAULT_ALIGNMENT, STRING
from penstock.quant.gguf import num_bytes

VERSION = 3
U32, I32, F32, U64, I64, F64 = 4, 5, 6, 10, 11, 12
PACKING = {U32: "<I", I32: "<i", F32: "<f", U64: "<Q", I64: "<q", F64: "<d", BOOL: "<?"}


@dataclass(frozen=True)
class Typed:
    """A metadata value whose type in the file is not what its Python type suggests."""

    kind: int
    value: Any


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in torch
    ggml_type: int

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.ggml_type, self.shape)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[GgufTensor], raw: Iterable[np.ndarray]
) -> None:
    """Write a file; `raw` gives the bytes of each tensor in turn. The file is complete and on the disk afterwards."""
    alignment = DEFAULT_ALIGNMENT
    metadata = {key: value for key, value in metadata.items() if key != "general.alignment"}
    header = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
    header += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    offset, described = 0, []
    for tensor in tensors:
        dims = tensor.shape[::-1]
        described.append(
            _string(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.ggml_type, offset)
        )
        offset += -(-tensor.num_bytes // alignment) * alignment
    header += b"".join(described)
    with path.open("wb") as file:
        file.write(header + b"\0" * (-len(header) % alignment))
        for tensor, data in zip(tensors, raw, strict=True):
            if data.nbytes != tensor.num_bytes:
                raise ValueError(f"{tensor.name} takes {tensor.num_bytes} bytes, not {data.nbytes}")
            file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            file.write(b"\0" * (-data.nbytes % alignment))
        file.flush()
        os.fsync(file.fileno())


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return U32 if 0 <= value < 1 << 32 else I32 if -(1 << 31) <= value < 0 else I64 if value < 0 else U64
    return F32 if isinstance(value, float) else STRING


def _value(value: Any) -> bytes:
    """Encode a value with its type; bytes are such an encoding already."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Typed):
        return struct.pack("<I", value.kind) + struct.pack(PACKING[value.kind], value.value)
    if not isinstance(value, (list, tuple)):
        kind = _kind(value)
        return struct.pack("<I", kind) + (_string(value) if kind == STRING else struct.pack(PACKING[kind], value))
    kinds = {_kind(each) for each in value}
    kind = kinds.pop() if len(kinds) == 1 else F32 if F32 in kinds else I32 if kinds else STRING
    head = struct.pack("<IIQ", ARRAY, kind, len(value))
    if kind == STRING:
        return head + b"".join(map(_string, value))
    return head + np.array(value, dtype=np.dtype(PACKING[kind][1:].replace("?", "b")).newbyteorder("<")).tobytes()
