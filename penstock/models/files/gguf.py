"""Read a GGUF file's metadata and tensor offsets.

The file is mapped, never read whole, and not trusted: every count, length, type and offset is checked against the
file's size first. Any damage is one `InvalidModel`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.errors import InvalidModel
from penstock.models.files.json_file import Damaged, quote_name
from penstock.quant.gguf import num_bytes

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ELEMENTS = 1 << 22  # over all arrays; the largest vocabularies have 2**18 tokens
MAX_METADATA_BYTES = 1 << 28
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = frozenset(1 << power for power in range(3, 21))

BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type, shape and position."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in torch (the file has it reversed)
    ggml_type: int
    start: int  # byte offset in the file
    num_bytes: int


class Cursor:
    """A position in the mapped file that cannot leave it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.end = len(data)
        self.num_elements = 0

    def skip(self, count: int, what: str) -> int:
        """Skip `count` bytes; return where they began."""
        if count > self.end - self.at:
            raise Damaged(f"{what} at byte {self.at} needs {count} bytes, {self.end - self.at} are left")
        self.at += count
        return self.at - count

    def u32(self, what: str) -> int:
        return int(U32.unpack_from(self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(U64.unpack_from(self.data, self.skip(8, what))[0])

    def string(self, what: str) -> str:
        start = self.skip(self.u64(what), what)
        return _text([self.data[start : self.at]], what)[0]

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what)
        return self.numbers(kind, 1, what)[0]

    def array(self, what: str) -> list[Any]:
        kind, count = self.u32(what), self.u64(what)
        self.num_elements += count
        if self.num_elements > MAX_ELEMENTS:
            raise Damaged(f"{what} has {count} elements; all arrays together may have {MAX_ELEMENTS}")
        if kind == ARRAY:
            raise Damaged(f"{what} is an array of arrays, which no model uses")
        return self.strings(count, what) if kind == STRING else self.numbers(kind, count, what)

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = np.dtype("<u1" if kind == BOOL else NUMBERS.get(kind, "V"))
        if dtype.kind == "V":
            raise Damaged(f"{what} has the unknown value type {kind}")
        start = self.skip(count * dtype.itemsize, what)
        values: list[Any] = np.frombuffer(self.data, dtype, count, start).tolist()
        if kind != BOOL:
            return values
        if any(value > 1 for value in values):
            raise Damaged(f"{what} is a bool that is neither 0 nor 1")
        return [value == 1 for value in values]

    def strings(self, count: int, what: str) -> list[str]:
        """Like `string`, without a call per string: vocabularies have hundreds of thousands."""
        data, at, end, unpack = self.data, self.at, self.end, U64.unpack_from
        raw: list[bytes] = []
        for _ in range(count):
            begin = at + 8
            if begin > end:
                raise Damaged(f"{what} ends at string {len(raw)} of {count}")
            at = begin + unpack(data, at)[0]
            if at > end:
                raise Damaged(f"{what}: string {len(raw)} needs {at - begin} bytes, {end - begin} are left")
            raw.append(data[begin:at])
        self.at = at
        return _text(raw, what)


def _text(raw: list[bytes], what: str) -> list[str]:
    try:
        return [each.decode() for each in raw]
    except UnicodeDecodeError:
        raise Damaged(f"{what} is not UTF-8 text") from None


class GgufFile:
    """The metadata of a GGUF file, and its tensors' bytes on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        try:
            self._read(Cursor(self.data))
        except InvalidModel as error:
            self.close()
            remedy = "; the file is damaged, fetch it again" if isinstance(error, Damaged) else ""
            raise InvalidModel(f"{path}: {error}{remedy}") from None

    def _read(self, cursor: Cursor) -> None:
        self.version = _version(cursor)
        num_tensors, num_keys = cursor.u64("tensor count"), cursor.u64("metadata count")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise _too_many(num_tensors, num_keys)
        self.metadata, self._places = _metadata(cursor, num_keys)
        if num_tensors == 0 and self.metadata.get("split.count", 0) in (0, 1):  # a first part may hold metadata alone
            raise _too_many(num_tensors, num_keys)
        self.alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(self.alignment) is not int or self.alignment not in ALIGNMENTS:
            raise Damaged(f"general.alignment is {self.alignment!r}; it must be a power of two from 8 to 2**20")
        self.tensors = _tensors(cursor, num_tensors, self.alignment)

    def raw(self, info: TensorInfo) -> np.ndarray:
        """Return the tensor's bytes, mapped from the file."""
        return np.frombuffer(self.data, np.uint8, info.num_bytes, info.start)

    def stored_value(self, key: str) -> bytes:
        """Return a metadata value as the file has it: its type, then its bytes."""
        return self.data[self._places[key]]

    def close(self) -> None:
        with suppress(BufferError):  # an array from raw() is still alive and keeps the mapping
            self.data.close()


def _too_many(num_tensors: int, num_keys: int) -> Damaged:
    return Damaged(
        f"{num_tensors} tensors and {num_keys} metadata keys; 1 to {MAX_TENSORS} tensors and "
        f"at most {MAX_KEYS} keys are supported"
    )


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise InvalidModel(f"{path}: no such file") from None
    except ValueError:
        raise InvalidModel(f"{path}: the file is empty, fetch it again") from None
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror}") from None


def _version(cursor: Cursor) -> int:
    magic = cursor.data[cursor.skip(4, "magic number") : cursor.at]
    if magic != b"GGUF":
        raise InvalidModel(f"it begins with {magic!r} instead of b'GGUF'")
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0 and version:
        raise InvalidModel(
            "it is big-endian; only little-endian GGUF is supported; convert it again without --bigendian"
        )
    if version == 1:
        raise InvalidModel("it is GGUF version 1, obsolete since 2023; convert the model again")
    raise InvalidModel(f"it is GGUF version {version}; versions 2 and 3 are supported")


def _metadata(cursor: Cursor, num_keys: int) -> tuple[dict[str, Any], dict[str, slice]]:
    """Read the values, and where each lies with its type."""
    begin, metadata, places = cursor.at, dict[str, Any](), dict[str, slice]()
    for number in range(num_keys):
        key = cursor.string(f"metadata key {number}")
        if not key or key in metadata:
            raise Damaged(f"metadata key {quote_name(key)} is empty or duplicated")
        start = cursor.at
        metadata[key] = cursor.value(cursor.u32(f"type of {quote_name(key)}"), quote_name(key))
        places[key] = slice(start, cursor.at)
        if cursor.at - begin > MAX_METADATA_BYTES:
            raise Damaged(f"the metadata up to {quote_name(key)} takes more than {MAX_METADATA_BYTES} bytes")
    return metadata, places


def _tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    described: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for number in range(count):
        name = cursor.string(f"name of tensor {number}")
        if not name or name in described:
            raise Damaged(f"tensor {quote_name(name)} has no name or is duplicated")
        shape = _shape(cursor, name)
        described[name] = shape, cursor.u32(f"type of {quote_name(name)}"), cursor.u64(f"offset of {quote_name(name)}")
    begin = -(-cursor.at // alignment) * alignment
    tensors = {name: _place(name, *each, begin, alignment, cursor.end) for name, each in described.items()}
    end = 0
    for info in sorted(tensors.values(), key=lambda info: info.start):
        if info.start < end:
            raise Damaged(f"tensor {quote_name(info.name)} begins at byte {info.start}, inside the one before it")
        end = info.start + info.num_bytes
    return tensors


def _shape(cursor: Cursor, name: str) -> tuple[int, ...]:
    count = cursor.u32(f"dimensions of {quote_name(name)}")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise Damaged(f"tensor {quote_name(name)} has {count} dimensions; it may have 1 to {MAX_DIMENSIONS}")
    sizes = [cursor.u64(f"dimensions of {quote_name(name)}") for _ in range(count)]
    if 0 in sizes or math.prod(sizes) >= 1 << 63:
        raise Damaged(f"tensor {quote_name(name)} has the impossible shape {sizes}")
    return tuple(reversed(sizes))


def _place(
    name: str, shape: tuple[int, ...], ggml_type: int, offset: int, begin: int, alignment: int, end: int
) -> TensorInfo:
    try:
        size = num_bytes(ggml_type, shape)
    except InvalidModel as error:
        raise InvalidModel(f"tensor {quote_name(name)}: {error}") from None
    if offset % alignment:
        raise Damaged(f"tensor {quote_name(name)} is at offset {offset}, not a multiple of the alignment {alignment}")
    if begin + offset + size > end:
        raise Damaged(f"tensor {quote_name(name)} ends at byte {begin + offset + size}, the file at {end}")
    return TensorInfo(name, shape, ggml_type, begin + offset, size)


class Tensors(Protocol):
    """The metadata and tensors of a file, or of all parts of a model."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def raw(self, info: TensorInfo) -> np.ndarray: ...


MAX_COUNT = (1 << 31) - 1
MAX_VECTOR = 1 << 14

# Keys without effect on the forward pass, or redundant with the tensors.
HARMLESS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type", "embedding_length_out"}
)


class Keys:
    """Reads typed keys and remembers which were read."""

    def __init__(self, file: Tensors) -> None:
        self.file = file
        self.metadata = file.metadata
        self.tensors = file.tensors
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise InvalidModel("the metadata has no general.architecture")
        self.architecture = architecture
        self.read = set(HARMLESS)

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def vector(self, tensor: str) -> list[float]:
        """Return the numbers of a float32 vector; empty if there is no such tensor."""
        info = self.tensors.get(tensor)
        if info is None:
            return []
        if info.ggml_type != 0 or len(info.shape) != 1 or info.shape[0] > MAX_VECTOR:
            raise InvalidModel(f"tensor {tensor!r} must be a float32 vector of at most {MAX_VECTOR} numbers")
        return [float(str(each)) for each in self.file.raw(info).view("<f4")]

    def get(self, key: str) -> Any:
        self.read.add(key)
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1; a list of equal ones (one per layer) counts as that number."""
        value = self.get(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise self._wrong(key, value, f"a whole number from 1 to {MAX_COUNT}")
        return value

    def optional_count(self, key: str) -> int | None:
        """Like `count`; absent and 0 both mean None."""
        return None if self.get(key) in (None, 0) else self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; float32 becomes the decimal it was rounded from: 1e-05, not 9.99999975e-06."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(str(np.float32(value))) if abs(value) < 3e38 else float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return default if value is None else value

    def require(self, key: str, allowed: Collection[Any]) -> None:
        """Refuse values that no family computes."""
        value = self.get(key)
        if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
            raise self._wrong(key, value, f"{' or '.join(map(str, allowed))}, nothing else is supported")

    def refuse_unread(self) -> None:
        prefix = f"{self.architecture}."
        for key in self.metadata:
            if key.startswith(prefix) and key[len(prefix) :] not in self.read:
                raise InvalidModel(
                    f"metadata key {quote_name(key)} is unknown and may change the results, so the model is refused"
                )

    def _wrong(self, key: str, value: Any, limit: str) -> InvalidModel:
        state = "is missing" if value is None else f"is {quote_name(str(value))}"
        return InvalidModel(f"metadata key {self.architecture}.{key} {state}; it must be {limit}")
