"""A model folder with safetensors, in one file or in shards named by an index."""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.errors import InvalidModel
from penstock.models.files.checkpoint import Format, Span
from penstock.models.files.json_file import (
    Damaged,
    parse_object,
    quote_name,
    read_config,
    read_generation_config,
    read_object,
)

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
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's dtype, shape and byte range."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # in the data after the header
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        if not path.is_file():
            raise Damaged("it is not a regular file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise Damaged(f"its header would take {length} bytes of the file's {size}; {MAX_HEADER_BYTES} at most")
            header = parse_object(file.read(length))
        return _read_entries(header, size - 8 - length)
    except Damaged as error:
        raise InvalidModel(f"{path}: {error}; the file is damaged, fetch it again") from None
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror}") from None


def _read_entries(header: dict[str, Any], num_bytes: int) -> dict[str, TensorEntry]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
        raise Damaged("__metadata__ must map names to strings")
    entries = {name: _entry(name, value) for name, value in header.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise Damaged(f"tensor {quote_name(name)} begins at byte {entry.begin}, the one before it ends at {end}")
        end = entry.end
    if end != num_bytes:
        raise Damaged(f"the tensors take {end} bytes, the file has {num_bytes} for them")
    return entries


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(name: str, value: Any) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"} or not 0 < len(name) <= MAX_NAME:
        raise Damaged(f"tensor {quote_name(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Damaged(f"tensor {quote_name(name)} has the unknown dtype {quote_name(str(dtype))}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise Damaged(f"tensor {quote_name(name)} has the impossible shape {quote_name(str(shape))}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise Damaged(f"tensor {quote_name(name)} has the impossible offsets {quote_name(str(offsets))}")
    torch_name, itemsize = DTYPES[dtype]
    if offsets[1] - offsets[0] != math.prod(shape) * itemsize:
        raise Damaged(
            f"tensor {quote_name(name)} of shape {shape} and dtype {dtype} does not fill its "
            f"{offsets[1] - offsets[0]} bytes"
        )
    return TensorEntry(torch_name, tuple(shape), offsets[0], offsets[1])


INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 26
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class SafetensorsCheckpoint:
    """A folder of safetensors with config.json."""

    format: Format = "safetensors"
    metadata = None

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = read_config(folder)
        self.generation_config = read_generation_config(folder)
        self.entries: dict[str, tuple[str, TensorEntry]] = _entries(folder)
        self.num_bytes = sum(entry.end - entry.begin for _, entry in self.entries.values())
        self.quantization = self._most_common_dtype()
        self._open: dict[str, Any] = {}

    def _most_common_dtype(self) -> str:
        sizes: Counter[str] = Counter()
        for _, entry in self.entries.values():
            sizes[entry.dtype] += entry.end - entry.begin
        return sizes.most_common(1)[0][0]

    def names(self) -> list[str]:
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name][1].shape

    def dtype(self, name: str) -> str:
        return self.entries[name][1].dtype

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor, mapped: pages are read on access."""
        shard, _ = self.entries[name]
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(self.path / shard, framework="pt", device="cpu")
            tensor: torch.Tensor = self._open[shard].get_tensor(name)
            return tensor
        except Exception as error:  # the library's own errors, and mapping errors of the system
            reason = str(error).partition("\n")[0]
            raise InvalidModel(f"{self.path / shard}: tensor {quote_name(name)} cannot be read: {reason}") from None

    def read_ggml(self, name: str) -> None:
        return None

    def read_codes(self, name: str) -> None:
        return None

    def is_packed(self, name: str) -> bool:
        return False

    def list_spans(self) -> dict[str, Span]:
        begins = {shard: _find_data(self.path / shard) for shard in {shard for shard, _ in self.entries.values()}}
        return {
            name: Span(self.path / shard, begins[shard] + entry.begin, begins[shard] + entry.end)
            for name, (shard, entry) in self.entries.items()
        }

    def tokenizer_source(self) -> Path:
        return self.path

    def close(self) -> None:
        self._open.clear()


def _find_data(path: Path) -> int:
    """Return where the data begins after a header that was read before."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _entries(folder: Path) -> dict[str, tuple[str, TensorEntry]]:
    index = folder / INDEX
    entries = _read_shards(folder, index) if index.is_file() else _read_single(folder)
    if not entries:
        raise InvalidModel(f"{folder} has no tensors; fetch it again")
    return entries


def _read_single(folder: Path) -> dict[str, tuple[str, TensorEntry]]:
    path = folder / "model.safetensors"
    if not path.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            raise _without_weights(folder, found)
        path = found[0]
    return {name: (path.name, entry) for name, entry in read_header(path).items()}


def _read_shards(folder: Path, index: Path) -> dict[str, tuple[str, TensorEntry]]:
    weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InvalidModel(f"{index}: weight_map must map tensor names to file names; fetch the file again")
    headers = {shard: read_header(_shard(folder, index, shard)) for shard in sorted(set(weight_map.values()))}
    entries = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise InvalidModel(f"{index}: tensor {quote_name(name)} is not in {shard}; fetch the model again")
        entries[name] = shard, headers[shard][name]
    return entries


def _shard(folder: Path, index: Path, shard: str) -> Path:
    """Return the path of a shard, which must be in this folder (itself possibly a link, as in the hub's cache)."""
    if Path(shard).name != shard or not shard.endswith(".safetensors") or not shard.isprintable() or "\\" in shard:
        raise InvalidModel(
            f"{index}: {quote_name(shard)} is not the name of a .safetensors file in the folder; refused"
        )
    if not (folder / shard).is_file():
        raise InvalidModel(f"{folder / shard} is missing; fetch the model again")
    return folder / shard


def _without_weights(folder: Path, files: list[Path]) -> InvalidModel:
    if files:
        return InvalidModel(f"{folder} has {len(files)} safetensors files but no {INDEX}; fetch the model again")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    return (
        pickle_error(folder / pickles[0])
        if pickles
        else InvalidModel(
            f"{folder} has no model.safetensors; fetch the model again, or use load_format='dummy' for random weights"
        )
    )


def pickle_error(path: Path) -> InvalidModel:
    return InvalidModel(
        f"{path} is a pickle, which can run any code when loaded, so it is not opened; "
        "save the model as safetensors (in transformers: model.save_pretrained(folder))"
    )
