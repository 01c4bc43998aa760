"""A model folder with safetensors, in one file or in shards named by an index."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.errors import InvalidModel
from penstock.models.files.checkpoint import Format
from penstock.models.files.damage import shown
from penstock.models.files.json_file import read_config, read_generation_config, read_object
from penstock.models.files.safetensors_header import Entry, read_header

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 26
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class SafetensorsCheckpoint:
    format: Format = "safetensors"
    metadata = None

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = read_config(folder)
        self.generation_config = read_generation_config(folder)
        self.entries: dict[str, tuple[str, Entry]] = _entries(folder)
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
        """Mapped, not copied: pages come in when they are read."""
        shard, _ = self.entries[name]
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(self.path / shard, framework="pt", device="cpu")
            tensor: torch.Tensor = self._open[shard].get_tensor(name)
            return tensor
        except Exception as error:  # the library's own errors, and what the system says about mapping
            reason = str(error).partition("\n")[0]
            raise InvalidModel(f"{self.path / shard}: tensor {shown(name)} cannot be read: {reason}") from None

    def stored(self, name: str) -> None:
        return None

    def tokenizer_source(self) -> Path:
        return self.path

    def close(self) -> None:
        self._open.clear()


def _entries(folder: Path) -> dict[str, tuple[str, Entry]]:
    index = folder / INDEX
    entries = _sharded(folder, index) if index.is_file() else _single(folder)
    if not entries:
        raise InvalidModel(f"{folder} has no tensors; fetch it again")
    return entries


def _single(folder: Path) -> dict[str, tuple[str, Entry]]:
    path = folder / "model.safetensors"
    if not path.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            raise _without_weights(folder, found)
        path = found[0]
    return {name: (path.name, entry) for name, entry in read_header(path).items()}


def _sharded(folder: Path, index: Path) -> dict[str, tuple[str, Entry]]:
    weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InvalidModel(f"{index}: weight_map must map tensor names to file names; fetch the file again")
    headers = {shard: read_header(_shard(folder, index, shard)) for shard in sorted(set(weight_map.values()))}
    entries = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise InvalidModel(f"{index}: tensor {shown(name)} is not in {shard}; fetch the model again")
        entries[name] = shard, headers[shard][name]
    return entries


def _shard(folder: Path, index: Path, shard: str) -> Path:
    """A shard is a file of this very folder (which may itself be a link, as in the hub's cache)."""
    if Path(shard).name != shard or not shard.endswith(".safetensors") or not shard.isprintable() or "\\" in shard:
        raise InvalidModel(f"{index}: {shown(shard)} is not the name of a .safetensors file in the folder; refused")
    if not (folder / shard).is_file():
        raise InvalidModel(f"{folder / shard} is missing; fetch the model again")
    return folder / shard


def _without_weights(folder: Path, found: list[Path]) -> InvalidModel:
    if found:
        return InvalidModel(f"{folder} has {len(found)} safetensors files but no {INDEX}; fetch the model again")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    return (
        pickle_refused(folder / pickles[0])
        if pickles
        else InvalidModel(
            f"{folder} has no model.safetensors; fetch the model again, or use load_format='dummy' for random weights"
        )
    )


def pickle_refused(path: Path) -> InvalidModel:
    return InvalidModel(
        f"{path} is a pickle, which can run any program when it is loaded: it is not opened; "
        "save the model as safetensors (in transformers: model.save_pretrained(folder))"
    )
