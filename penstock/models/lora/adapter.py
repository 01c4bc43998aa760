"""An adapter's tensors, each checked against the model before it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.cut import Cut
from penstock.models.files.json_file import quote_name
from penstock.models.files.safetensors import PICKLES, TensorEntry, read_header
from penstock.models.lora.config import CONFIG, MERGE, LoraConfig, read_lora_config
from penstock.models.lora.extras import Extra, find_extras
from penstock.models.lora.gguf import CheckedGguf, check_gguf
from penstock.models.lora.places import EMBEDDING, Find, LoraPlace, ModelPlaces, require_finite
from penstock.models.names import IGNORED
from penstock.models.reading import ungroup
from penstock.models.spec import ModelSpec
from penstock.ops import LowRank

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = re.compile(r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.weight)?$")
FROZEN = re.compile(r"\.base_layer\.(weight|bias)$")  # peft saves embeddings beside their adapters
FLOATS = ("float64", "float32", "bfloat16", "float16")
MAX_FACTOR = 1e35  # times a request's scale it is still a float32


@dataclass(frozen=True)
class Adapter:
    """The low-rank matrices of a model's linears, by our names of these."""

    parts: dict[str, list[LowRank]]
    rank: int  # the largest

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for parts in self.parts.values() for part in parts)


def fingerprint(folder: Path) -> str:
    """Return what changes when an adapter's files do."""
    try:
        files = [folder] if folder.suffix == ".gguf" else [folder / name for name in (CONFIG, WEIGHTS)]
        stats = [file.stat() for file in files]
    except OSError:
        return ""
    return "-".join(f"{each.st_size}.{each.st_mtime_ns}.{each.st_ino}" for each in stats)


@dataclass(frozen=True)
class CheckedAdapter:
    """An adapter's file whose names, ranks and shapes fit a model: its pairs of tensors a and b, by the modules' names
    in the base model."""

    path: Path
    config: LoraConfig
    pairs: dict[str, tuple[str, str]]
    places: dict[str, LoraPlace]
    rank: int  # the largest
    extras: dict[str, Extra]  # what can only be merged, by tensor

    def read_extras(self) -> Iterator[tuple[Extra, Tensor]]:
        with safe_open(self.path, framework="pt", device="cpu") as file:
            for name, extra in self.extras.items():
                yield extra, require_finite(self.path, file.get_tensor(name), name)

    def read(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each module with a [r, in] and b [out, r]."""
        with safe_open(self.path, framework="pt", device="cpu") as file:
            for module, names in self.pairs.items():
                a, b = (require_finite(self.path, file.get_tensor(name), name) for name in names)
                yield module, a, b


def read_adapter(folder: Path, spec: ModelSpec, max_rank: int) -> Adapter:
    """Read a PEFT folder, or a GGUF file of llama.cpp, for a model, or what one rank of a model needs of it."""
    checked = check_adapter(folder, spec if spec.cuts is None else spec.cuts.whole, max_rank)
    parts: dict[str, list[LowRank]] = {}
    for module, a, b in checked.read():
        place = checked.places[module]
        cut = None if spec.cuts is None else spec.cuts.find_adapter_cut(place.linear)
        packed = _pack(place, a, b, checked.config.find_scale(module), cut)
        if packed is not None:
            parts.setdefault(place.linear, []).append(packed)
    return Adapter(parts, checked.rank)


def check_adapter(
    folder: Path, spec: ModelSpec, max_rank: int, stored: Find | None = None
) -> CheckedAdapter | CheckedGguf:
    """Check names, ranks and shapes of a PEFT folder or a GGUF file before the first tensor is read. `stored` finds
    modules in the base's file, for an adapter that is to be merged."""
    find = stored or ModelPlaces(spec).find
    if folder.suffix == ".gguf":
        return check_gguf(folder, spec, max_rank, find, merges=stored is not None)
    if not folder.is_dir():
        raise InvalidModel(f"{folder} is no folder: name one with {CONFIG} and {WEIGHTS}, or a GGUF file")
    config, path = read_lora_config(folder, merges=stored is not None), folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(each.name for each in folder.iterdir() if each.suffix in PICKLES)
        raise InvalidModel(
            f"{folder / pickles[0]} is a pickle, which can run any code when loaded, so it is not opened: save the "
            "adapter as safetensors (in peft: save_pretrained(folder, safe_serialization=True))"
            if pickles
            else f"{folder} has no {WEIGHTS}: fetch the adapter again"
        )
    entries = read_header(path)
    extras = find_extras(entries, config) if stored else {}
    pairs = _pair(path, {name: entry for name, entry in entries.items() if name not in extras}, spec)
    if not pairs:
        raise InvalidModel(f"{path} has no lora_A and lora_B: it is no adapter, or has nothing to add")
    places = {module: _locate(path, module, pair, entries, config, (spec, find)) for module, pair in pairs.items()}
    _check_layers(path, pairs, config, (spec, find))
    _require_disjoint(path, places)
    rank = max(entries[a].shape[0] for a, _ in pairs.values())
    if rank > max_rank:
        raise InvalidModel(f"{folder}: rank {rank} is over max_lora_rank={max_rank}: raise --max-lora-rank")
    return CheckedAdapter(path, config, pairs, places, rank, extras)


def _require_disjoint(path: Path, places: dict[str, LoraPlace]) -> None:
    taken: dict[str, list[LoraPlace]] = {}
    for place in places.values():
        taken.setdefault(place.linear, []).append(place)
    for linear, found in taken.items():
        found.sort(key=lambda place: place.first)
        if any(a.first + a.num_out > b.first for a, b in pairwise(found)):
            raise InvalidModel(
                f"{path}: two modules add to the same outputs of {linear}: a merged projection and a part of it; "
                "fetch the adapter again"
            )


def _pack(place: LoraPlace, a: Tensor, b: Tensor, scale: float, cut: Cut | None) -> LowRank | None:
    """Lay out a module's low-rank product for the kernels; None if this rank has none of its outputs."""
    b = b if place.group is None else ungroup(b, *place.group)
    first = place.first
    if cut is not None and cut.columns is not None:
        a = a[:, cut.columns.start : cut.columns.stop].contiguous()
    if cut is not None and cut.rows is not None:
        first = sum(len(run) for run in cut.runs_within(0, place.first))
        runs = cut.runs_within(place.first, place.num_out)
        if not runs:
            return None
        b = torch.cat([b[run.start : run.stop] for run in runs])
    return LowRank.pack(a, b, first, scale, is_embedding=place.linear == EMBEDDING)


def _pair(path: Path, entries: dict[str, TensorEntry], spec: ModelSpec) -> dict[str, tuple[str, str]]:
    """Find the tensors a and b of every module, by the module's name in the base model."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        inner = name.removeprefix(PREFIX)
        end = ENDS.search(inner)
        if end is None:
            _require_copy(path, name, inner, entry, spec)
            continue
        if entry.dtype not in FLOATS or len(entry.shape) != 2:
            raise InvalidModel(
                f"{path}: tensor {quote_name(name)} of dtype {entry.dtype} and shape {list(entry.shape)} is no "
                "low-rank matrix: fetch the adapter again"
            )
        found.setdefault(inner[: end.start()], {})[end[1].rpartition("_")[2]] = name
    for pair in found.values():
        if len(pair) == 1:
            half, name = next(iter(pair.items()))
            raise InvalidModel(f"{path}: tensor {quote_name(name)} has no lora_{'AB'[half == 'A']} beside it")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _require_copy(path: Path, name: str, inner: str, entry: TensorEntry, spec: ModelSpec) -> None:
    """Accept a copy of a frozen embedding, which peft saves beside its adapter; refuse any other whole tensor."""
    stored = spec.names.find(FROZEN.sub(r".\1", inner))
    if FROZEN.search(inner) and stored is not None and stored is not IGNORED:
        shapes = spec.parameters()
        ours = "embedding.tokens.weight" if stored.name == "head.rows.weight" else stored.name
        if shapes.get(stored.name, shapes.get(ours)) == entry.shape:
            return
    raise InvalidModel(
        f"{path}: tensor {quote_name(name)} of shape {list(entry.shape)} is no part of a low-rank product: {MERGE}"
    )


def _find_layer(module: str) -> int | None:
    inside = re.search(r"\.(\d{1,6})\.", module)
    return int(inside[1]) if inside else None


def _locate(
    path: Path,
    module: str,
    pair: tuple[str, str],
    entries: dict[str, TensorEntry],
    config: LoraConfig,
    base: tuple[ModelSpec, Find],
) -> LoraPlace:
    """Find a module's place and check both tensors against it."""
    spec, find = base
    place = find(module)
    if place is None:
        raise InvalidModel(
            f"{path}: tensor {quote_name(pair[0])} belongs to no linear of this {spec.architecture} that may have an "
            "adapter: it is of another model, or of experts, positions or kv_b_proj, which can be merged alone"
        )
    if not config.targets_module(module, _find_layer(module)):
        raise InvalidModel(
            f"{path}: tensor {quote_name(pair[0])} is of a module that target_modules does not name: config and "
            "tensors do not belong together"
        )
    rank, factor = config.find_rank(module), config.find_scale(module)
    if abs(factor) > MAX_FACTOR:
        raise InvalidModel(
            f"{path}: lora_alpha / r of {quote_name(module)} is {factor:g}, over {MAX_FACTOR:.3g}: "
            "correct lora_alpha or alpha_pattern"
        )
    for name, expected in zip(pair, ((rank, place.num_in), (place.num_out, rank))):
        if entries[name].shape != expected:
            raise InvalidModel(
                f"{path}: tensor {quote_name(name)} has shape {list(entries[name].shape)}, this model and rank {rank} "
                f"take {list(expected)}: the adapter is of another model"
            )
    return place


def _check_layers(
    path: Path, pairs: dict[str, tuple[str, str]], config: LoraConfig, base: tuple[ModelSpec, Find]
) -> None:
    """Require that a module adapted in one layer is adapted in every layer that the config names."""
    for module in {re.sub(r"\.\d{1,6}\.", ".*.", name, count=1) for name in pairs}:
        for wanted in _list_layers(module, *base):
            targeted = config.targets == "all-linear" or config.targets_module(wanted, _find_layer(wanted))
            if targeted and wanted not in pairs:
                raise InvalidModel(
                    f"{path}: tensors of {quote_name(wanted)} are missing, which target_modules names: "
                    "fetch the adapter again"
                )


def _list_layers(module: str, spec: ModelSpec, find: Find) -> Iterator[str]:
    """Name the module in every layer that has it."""
    for index in range(spec.num_layers if "*" in module else 0):
        wanted = module.replace("*", str(index), 1)
        if find(wanted) is not None:
            yield wanted
