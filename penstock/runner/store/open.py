"""Open the store of an engine, under names that mean the same blocks in every engine that computes the same bits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from penstock.cache.group import Grouping
from penstock.cache.store import BlockNames, Offloading
from penstock.config import Resolved
from penstock.host.gguf_parts import parse_part
from penstock.host.samples import sample_file
from penstock.host.version import VERSION
from penstock.models.spec import ModelSpec
from penstock.ops import cpu
from penstock.runner.store.blocks import BlockStore
from penstock.runner.store.files import FileTier

GIB = 1 << 30
SAMPLE_BYTES = 1 << 16  # of a model's file that are read at a time
SAVED_BYTES = 4 << 20  # by a plan with rows, unless one block is larger
CODE = (".py", ".so", ".pyd")
SETTINGS = (
    *("dtype", "quantization", "activation_dtype", "kv_cache_dtype", "block_size", "deterministic", "keeps_packed"),
    *("kv_cache_dtype_skip_layers", "load_format", "speculative_config", "device"),
    *("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"),
)


@dataclass(frozen=True)
class RankPart:
    """A rank's part of each block: its number, and its share of the bytes."""

    rank: int = 0
    share: float = 1.0


WHOLE = RankPart()


def open_store(
    settings: Resolved, path: Path | None, spec: ModelSpec, grouping: Grouping, part: RankPart = WHOLE
) -> tuple[BlockStore, Offloading] | None:
    """Open what the settings ask for; None if that is nothing. `path`: the model's, `grouping`: of all ranks."""
    wanted = settings.kv_offloading_size or settings.kv_offloading_path is not None
    if not wanted or path is None or not grouping.groups or not settings.enable_prefix_caching:
        return None
    files = None
    if settings.kv_offloading_path is not None:
        files = FileTier(settings.kv_offloading_path, int(settings.kv_offloading_disk_size * GIB))
    fingerprint, between_machines = make_fingerprints(settings, path, spec, grouping)
    name = f"rank {part.rank} {fingerprint}".encode() if part.rank else b""
    store = BlockStore(int(settings.kv_offloading_size * part.share * GIB), files, name)
    names = BlockNames(fingerprint, between_machines=between_machines)
    return store, Offloading(store, names, max(1, SAVED_BYTES // grouping.block_bytes), grouping.block_bytes)


def make_fingerprints(settings: Resolved, path: Path, spec: ModelSpec, grouping: Grouping) -> tuple[str, str]:
    """Describe all that a block's bytes depend on, besides its tokens, adapters and salt; with the times of the model's
    files and without, as servers on several machines compare them."""
    chosen = [(name, getattr(settings, name)) for name in SETTINGS]
    model = (spec.embedding, spec.layers, spec.norm, spec.head)  # angles may depend on the context length
    seed = settings.seed if settings.load_format == "dummy" else 0
    code = (VERSION, _hash_code(), _name_device(settings.device))
    files = _describe_files(path)
    timeless = [(name, size, sample) for name, size, _, sample in files]
    whole, part = (repr((code, chosen, seed, model, grouping, described)) for described in (files, timeless))
    return whole, part


def _name_device(device: str) -> str:
    if device == "cpu":
        return f"cpu {cpu.path()}"
    return f"{torch.cuda.get_device_name()} torch {torch.__version__}"


def _describe_files(path: Path) -> list[tuple[str, int, int, str]]:
    """Describe a model's files by name, size, time and some of their contents."""
    if path.is_dir():
        found = [file for file in path.iterdir() if file.is_file()]
    else:
        part = parse_part(path.name)
        found = [path.parent / name for name in part.all()] if part is not None else [path]
    described = []
    for file in sorted(found):
        seen = file.stat()
        described.append((file.name, seen.st_size, seen.st_mtime_ns, sample_file(file, seen.st_size, SAMPLE_BYTES)))
    return described


@lru_cache(maxsize=1)
def _hash_code() -> str:
    """Hash the package, so that no other version's bits are taken for this one's."""
    made, root = hashlib.blake2b(digest_size=16), Path(__file__).parents[2]
    for file in sorted(root.rglob("*")):
        if file.suffix in CODE and file.is_file():
            made.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return made.hexdigest()
