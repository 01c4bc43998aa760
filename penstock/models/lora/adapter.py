"""An adapter's tensors, each checked against the model before it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.files.json_file import quote_name
from penstock.models.files.safetensors import PICKLES, TensorEntry, read_header
from penstock.models.lora.config import CONFIG, MERGE, MERGED, SERVED, LoraConfig, read_lora_config
from penstock.models.lora.extras import Extra, find_extras
from penstock.models.lora.gguf import CheckedGguf, check_gguf
from penstock.models.lora.locator import Locator
from penstock.models.lora.packing import Adapter, TrainedProduct, pack
from penstock.models.lora.places import Find, LoraPlace, ModelPlaces, require_finite
from penstock.models.lora.replaced import Bases, Replacer
from penstock.models.names import IGNORED
from penstock.models.spec import ModelSpec

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = re.compile(r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.default)?(?:\.weight)?$")
FROZEN = re.compile(r"\.base_layer\.(weight|bias)$")  # peft saves embeddings beside their adapters
FLOATS = ("float64", "float32", "bfloat16", "float16")


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


def is_whole(spec: ModelSpec) -> bool:
    """Return True if one process has the whole model."""
    return spec.cuts is None and spec.stage is None


def read_adapter(folder: Path, spec: ModelSpec, max_rank: int, bases: Bases | None = None) -> Adapter:
    """Read a PEFT folder, or a GGUF file of llama.cpp, for a model, or what one rank of a model needs of it. Without
    the model's own weights, `bases`, low-rank matrices of linears are all it may have."""
    whole = spec if spec.cuts is None else spec.cuts.whole
    checked = check_adapter(folder, whole, max_rank, beside=bases is not None, with_mixtures=is_whole(spec))
    adapter = Adapter({}, checked.rank)
    if bases is not None and isinstance(checked, CheckedAdapter):
        find = ModelPlaces(whole, with_stacks=True).find
        replacer = Replacer(checked.path, checked.config, find, bases)
        by = replacer.sort(dict(checked.read_extras()))
        products = {
            module: TrainedProduct(a, b, checked.config.find_scale(checked.places[module].parameter or module))
            for module, a, b in checked.read()
        }
        replacer.add(adapter, products, checked.places, by)
        return adapter
    for module, a, b in checked.read():
        place = checked.places[module]
        cut = None if spec.cuts is None else spec.cuts.find_adapter_cut(place.linear)
        for linear, part in pack(place, TrainedProduct(a, b, checked.config.find_scale(module)), cut):
            adapter.add(linear, part)
    return adapter


def check_adapter(
    folder: Path,
    spec: ModelSpec,
    max_rank: int,
    stored: Find | None = None,
    beside: bool = False,
    with_mixtures: bool = False,
) -> CheckedAdapter | CheckedGguf:
    """Check names, ranks and shapes of a PEFT folder or a GGUF file before the first tensor is read. `stored` finds
    modules in the base's file, for an adapter that is to be merged. `beside`: all that can be computed beside the
    model may be there; `with_mixtures`: routers and shared experts at least."""
    is_gguf = folder.suffix == ".gguf"
    places = ModelPlaces(spec, with_stacks=beside and not is_gguf, with_mixtures=with_mixtures and not is_gguf)
    find = stored or places.find
    if is_gguf:
        return check_gguf(folder, spec, max_rank, find, merges=stored is not None)
    if not folder.is_dir():
        raise InvalidModel(f"{folder} is no folder: name one with {CONFIG} and {WEIGHTS}, or a GGUF file")
    allowed = MERGED if stored else SERVED if beside else ()
    config, path = read_lora_config(folder, allowed), folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(each.name for each in folder.iterdir() if each.suffix in PICKLES)
        raise InvalidModel(
            f"{folder / pickles[0]} is a pickle, which can run any code when loaded, so it is not opened: save the "
            "adapter as safetensors (in peft: save_pretrained(folder, safe_serialization=True))"
            if pickles
            else f"{folder} has no {WEIGHTS}: fetch the adapter again"
        )
    entries = read_header(path)
    replaces = config.has_magnitudes or config.has_biases or config.wholes
    extras = find_extras(entries, config) if stored or replaces else {}
    pairs = _pair(path, {name: entry for name, entry in entries.items() if name not in extras}, spec)
    if not pairs:
        raise InvalidModel(f"{path} has no lora_A and lora_B: it is no adapter, or has nothing to add")
    locator = Locator(path, config, spec, find, places.find_stacks)
    located = {module: locator.locate(module, pair, entries) for module, pair in pairs.items()}
    locator.check_layers(pairs)
    locator.check_stacks(located)
    _require_disjoint(path, located)
    rank = max(entries[a].shape[0] // located[module].stack for module, (a, _) in pairs.items())
    if rank > max_rank:
        raise InvalidModel(f"{folder}: rank {rank} is over max_lora_rank={max_rank}: raise --max-lora-rank")
    return CheckedAdapter(path, config, pairs, located, rank, extras)


def _require_disjoint(path: Path, places: dict[str, LoraPlace]) -> None:
    taken: dict[str, list[range]] = {}
    for place in places.values():
        taken.setdefault(place.linear, []).append(place.rows)
    for linear, found in taken.items():
        found.sort(key=lambda rows: rows.start)
        if any(a.stop > b.start for a, b in pairwise(found)):
            raise InvalidModel(
                f"{path}: two modules add to the same outputs of {linear}: a merged projection and a part of it; "
                "fetch the adapter again"
            )


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
