"""Merge adapters into the weights of a safetensors folder, shard by shard."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.files import open_checkpoint
from penstock.models.files.json_file import quote_name, read_config
from penstock.models.files.safetensors import INDEX, PICKLES, SafetensorsCheckpoint
from penstock.models.lora.adapter import FLOATS, check_adapter
from penstock.models.lora.changes import (
    HEAD,
    LowRankTerm,
    StoredTensors,
    TokenRows,
    WeightChange,
    WholeTensor,
    apply_changes,
)
from penstock.models.lora.config import MAX_RANK, LoraConfig
from penstock.models.lora.places import EMBEDDING
from penstock.models.spec import ModelSpec, spec_from_config

WEIGHTS_AND_PARTS = (".safetensors", ".gguf", *PICKLES)
TIES = "tie_word_embeddings"


@dataclass(frozen=True)
class ScaledAdapter:
    """A PEFT folder, and a factor of what it adds."""

    folder: Path
    scale: float = 1.0


def merge(path: Path, adapters: Sequence[ScaledAdapter], out: Path) -> int:
    """Write a model of safetensors with adapters in its weights to a new folder; returns the number of tensors that
    changed. Sums are float32, rounded once to the dtype that the base stores."""
    if path.is_dir():
        _require_floats(path)
    base = open_checkpoint(path)
    try:
        if not isinstance(base, SafetensorsCheckpoint):
            raise InvalidModel(
                f"{path} holds no plain safetensors: merge into the folder it was made from, then convert the result"
            )
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InvalidModel(f"{out} exists: name a folder that does not, or an empty one")
        return _merge(base, spec_from_config(base.config), adapters, out)
    finally:
        base.close()


def _merge(base: SafetensorsCheckpoint, spec: ModelSpec, adapters: Sequence[ScaledAdapter], out: Path) -> int:
    tensors = StoredTensors(base, spec)
    terms = _collect(tensors, adapters)
    embedding = tensors.find_stored(f"{EMBEDDING}.weight")
    head = spec.names.spelling(HEAD)
    unties = head not in base.entries and embedding is not None and not {head, embedding}.isdisjoint(terms)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as made:
        folder = Path(made, "model")
        folder.mkdir()
        added = {head: embedding} if unties and embedding is not None else {}
        _write_shards(base, terms, added, folder)
        _copy_rest(base.path, folder, unties)
        if out.exists():
            out.rmdir()
        folder.rename(out)
    return len(terms.keys() | added.keys())


def _require_floats(folder: Path) -> None:
    config = read_config(folder)
    method = config.get("quantization_config") or config.get("compression_config")
    if method:
        kind = method.get("quant_method", "quantized") if isinstance(method, dict) else "quantized"
        raise InvalidModel(
            f"{folder} is quantized ({kind}): merge into the model it was made from, then quantize the result"
        )


def _collect(tensors: StoredTensors, adapters: Sequence[ScaledAdapter]) -> dict[str, list[WeightChange]]:
    """Collect what is done to each tensor of the base."""
    changes: dict[str, list[WeightChange]] = {}
    for adapter in adapters:
        checked = check_adapter(adapter.folder, tensors.spec, MAX_RANK, tensors.place)
        terms: dict[str, LowRankTerm] = {}
        for module, a, b in checked.read():
            name = tensors.require(f"{module}.weight", adapter.folder)
            scale, is_transposed = checked.config.find_scale(module), tensors.is_transposed(name)
            terms[name] = LowRankTerm(a.float(), b.float(), scale, is_transposed)
        magnitudes: dict[str, Tensor] = {}
        for extra, tensor in checked.read_extras():
            name = tensors.require(extra.name, adapter.folder)
            if extra.kind == "magnitude":
                magnitudes[name] = tensor.float().flatten()
                continue
            made = WholeTensor(tensor) if extra.kind == "whole" else _find_rows(checked.config, extra.name, tensor)
            tensors.check(name, made, checked.path)
            changes.setdefault(name, []).append(WeightChange(made, adapter.scale))
        if checked.config.has_magnitudes and magnitudes.keys() != terms.keys():
            raise InvalidModel(
                f"{checked.path}: use_dora, but not each module has a magnitude: fetch the adapter again"
            )
        for name, term in terms.items():
            delta = tensors.add_magnitude(name, term, magnitudes.get(name), checked.path)
            changes.setdefault(name, []).append(WeightChange(delta, adapter.scale))
    return changes


def _find_rows(config: LoraConfig, name: str, tensor: Tensor) -> TokenRows:
    module = name.removesuffix(".weight")
    rows = next((rows for end, rows in config.tokens.items() if module == end or module.endswith(f".{end}")), ())
    return TokenRows(torch.tensor(rows, dtype=torch.int64), tensor)


def _write_shards(
    base: SafetensorsCheckpoint, terms: Mapping[str, list[WeightChange]], added: Mapping[str, str], folder: Path
) -> None:
    """Write the base's files with the terms added. `added` are tensors that begin as copies of others."""
    shards: dict[str, list[str]] = {}
    for name, (shard, _) in base.entries.items():
        shards.setdefault(shard, []).append(name)
    for name, source in added.items():
        shards[base.entries[source][0]].append(name)
    for shard, names in shards.items():
        tensors = {name: _merge_tensor(base, added.get(name, name), terms.get(name, ())) for name in names}
        save_file(tensors, folder / shard, {"format": "pt"})
        base.close()
    if (base.path / INDEX).is_file():
        sizes = {name: base.entries[added.get(name, name)][1] for names in shards.values() for name in names}
        index = {
            "metadata": {"total_size": sum(entry.end - entry.begin for entry in sizes.values())},
            "weight_map": {name: shard for shard, names in shards.items() for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _merge_tensor(base: SafetensorsCheckpoint, name: str, changes: Sequence[WeightChange]) -> Tensor:
    tensor = base.tensor(name)
    if not changes:
        return tensor.clone()  # two names may not share memory in a file
    if base.dtype(name) not in FLOATS:
        raise InvalidModel(
            f"{base.path}: tensor {quote_name(name)} is stored as {base.dtype(name)}: merge into the model it was "
            "made from, then quantize the result"
        )
    merged = apply_changes(tensor.float(), changes)
    if not merged.isfinite().all():
        raise InvalidModel(f"{quote_name(name)} has NaN or infinity with the adapters: choose smaller scales")
    return merged.to(tensor.dtype)


def _copy_rest(source: Path, folder: Path, unties: bool) -> None:
    """Copy config and tokenizer. `unties` says that embedding and head are two matrices now."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in WEIGHTS_AND_PARTS or path.name.endswith(".index.json")
        if path.is_file() and not path.name.startswith(".") and not is_weight:
            shutil.copyfile(path, folder / path.name)
    if unties:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        config[TIES] = False
        for inner in config.values():
            if isinstance(inner, dict) and TIES in inner:
                inner[TIES] = False
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
