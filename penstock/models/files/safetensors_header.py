"""The header of a safetensors file, checked to the last byte before anything maps the file."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import InvalidModel
from penstock.models.files.damage import Damaged, shown
from penstock.models.files.json_file import parse_object

MAX_HEADER_BYTES = 1 << 26
MAX_DIMENSIONS = 8
MAX_NAME = 1 << 12

DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in the data, which follows the header
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    try:
        if not path.is_file():
            raise Damaged("it is no regular file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise Damaged(f"its header would take {length} bytes of the file's {size}; {MAX_HEADER_BYTES} at most")
            header = parse_object(file.read(length))
        return _entries(header, size - 8 - length)
    except Damaged as error:
        raise InvalidModel(f"{path}: {error}; the file is damaged, fetch it again") from None
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror}") from None


def _entries(header: dict[str, Any], num_bytes: int) -> dict[str, Entry]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
        raise Damaged("__metadata__ must map names to strings")
    entries = {name: _entry(name, value) for name, value in header.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise Damaged(f"tensor {shown(name)} begins at byte {entry.begin}, the one before it ends at {end}")
        end = entry.end
    if end != num_bytes:
        raise Damaged(f"the tensors take {end} bytes, the file has {num_bytes} for them")
    return entries


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(name: str, value: Any) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"} or not 0 < len(name) <= MAX_NAME:
        raise Damaged(f"tensor {shown(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Damaged(f"tensor {shown(name)} has the unknown dtype {shown(str(dtype))}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise Damaged(f"tensor {shown(name)} has the impossible shape {shown(str(shape))}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise Damaged(f"tensor {shown(name)} has the impossible offsets {shown(str(offsets))}")
    torch_name, itemsize = DTYPES[dtype]
    if offsets[1] - offsets[0] != math.prod(shape) * itemsize:
        raise Damaged(
            f"tensor {shown(name)} of shape {shape} and dtype {dtype} does not fill its {offsets[1] - offsets[0]} bytes"
        )
    return Entry(torch_name, tuple(shape), offsets[0], offsets[1])
