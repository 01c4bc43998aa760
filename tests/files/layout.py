"""A GGUF file by hand: byte strings of its parts, so that any of them can be wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def tensor(name: str, shape: tuple[int, ...], ggml_type: int, offset: int) -> bytes:
    """`shape` as torch has it; the file has it reversed."""
    return text(name) + u32(len(shape)) + b"".join(map(u64, reversed(shape))) + u32(ggml_type) + u64(offset)


@dataclass
class Layout:
    """Parts of a file; what is None is computed from the rest."""

    magic: bytes = b"GGUF"
    version: bytes = u32(3)
    entries: list[bytes] = field(default_factory=lambda: [entry("general.architecture", STRING, text("llama"))])
    tensors: list[bytes] = field(default_factory=lambda: [tensor("a", (2, 8), 0, 0), tensor("b", (4,), 0, 64)])
    data: bytes = bytes(range(80))
    num_tensors: int | None = None
    num_entries: int | None = None
    alignment: int = 32

    def __bytes__(self) -> bytes:
        head = self.magic + self.version
        head += u64(len(self.tensors) if self.num_tensors is None else self.num_tensors)
        head += u64(len(self.entries) if self.num_entries is None else self.num_entries)
        head += b"".join(self.entries) + b"".join(self.tensors)
        return head + bytes(-len(head) % self.alignment) + self.data

    def with_(self, **changes: Any) -> Layout:
        return Layout(**{**self.__dict__, **changes})
