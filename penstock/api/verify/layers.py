"""Compare each layer of a loaded model with float32 ones; on a CPU bit for bit with plain ones of its weights too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.api.plan.fit import storage_options
from penstock.api.verify.finding import Finding, has_same_bits, relative_error
from penstock.cache.group import LAYOUTS, group_layers
from penstock.config import Resolved
from penstock.models.decoder import CPU, Build, Decoder
from penstock.models.files import Checkpoint
from penstock.models.load import Options, match, storage
from penstock.models.memory import KvMemory, LatentMemory
from penstock.models.reading import from_checkpoint, from_seed
from penstock.models.spec import ModelSpec
from penstock.ops import OPS, OpTable, Work
from penstock.runner.memory import BlockMemory
from penstock.runner.step import Step

LENGTHS = (33, 7, 1)  # of the sequences of the compared step
MAX_ERROR = {
    "float32": 1e-3,
    "16": 2e-2,
    "packed": 8e-2,
    "int4 cache": 0.3,
}  # relative to what a layer adds: see docs/verify.md


@dataclass(frozen=True)
class LayerDevice:
    """Where the compared layers run. A GPU's attention reads `tile_tokens` queries at once."""

    device: torch.device = CPU
    tile_tokens: int = 0

    def split(self, lengths: Sequence[int]) -> Work | None:
        """Deal the queries of whole sequences out in tiles, as a GPU's runner does."""
        if not self.tile_tokens:
            return None
        tiles = [(s, at) for s, length in enumerate(lengths) for at in range(0, length, self.tile_tokens)]
        return Work(0, torch.tensor(tiles, dtype=torch.int32, device=self.device), 1)


HOST = LayerDevice()


def find_layer_device(spec: ModelSpec, settings: Resolved) -> LayerDevice:
    """Return the place of a loaded model's layers."""
    if settings.device == "cpu":
        return HOST
    from penstock.ops.triton.attention.attention import tile_tokens
    from penstock.ops.triton.attention.latent import tile_tokens as latent_tile_tokens
    from penstock.ops.triton.exact.attention import tile_tokens as exact_tile_tokens

    device, of = torch.device(settings.device), exact_tile_tokens if settings.deterministic else tile_tokens
    tiles = [of(one.num_heads, one.num_kv_heads) for one in spec.memories() if isinstance(one, KvMemory)]
    tiles += [latent_tile_tokens(one.num_heads, device) for one in spec.memories() if isinstance(one, LatentMemory)]
    return LayerDevice(device, min(tiles, default=of(1, 1)))


class ReferenceOps(OpTable):
    """Every op's reference, whatever the device has."""

    def __getattr__(self, name: str) -> Any:
        if name not in OPS:
            raise AttributeError(f"there is no op {name!r}")
        return OPS[name].reference


def compare_layers(
    model: Decoder, checkpoint: Checkpoint | None, settings: Resolved, place: LayerDevice | None = None
) -> Iterator[Finding]:
    """Give each layer the same inputs, those of the reference, and yield what comes of it."""
    spec, place = model.spec, place or find_layer_device(model.spec, settings)
    plain = None if place.tile_tokens else _open(checkpoint, spec, storage_options(settings), OpTable("cpu"), settings)
    reference = _open(checkpoint, spec, Options(torch.float32, None), ReferenceOps("cpu"), settings)
    size, kv = settings.block_size, settings.kv_cache_dtype
    rows = [[(7919 * at + length) % spec.vocab_size for at in range(length)] for length in LENGTHS]
    rows = [row[: spec.max_model_len] for row in rows]
    here, own = make_step(spec, size, kv, rows, place)
    step, theirs = make_step(replace(spec, cache_dtypes=()), size, "float32", rows)
    packed, others = make_step(spec, size, kv, rows)
    embedding = reference.embedding(spec.embedding)
    x = embedding(step)
    embedded = model.embedding(here)
    yield _error("embedding", embedded, x, x, settings, checkpoint)
    for index, (described, block) in enumerate(zip(spec.layers, model.blocks)):
        name, given = f"layers.{index}", x.to(embedded, copy=True)  # a fused layer may write to it
        x = given.to(x, copy=True)  # of the precision that hidden states have there
        wanted = reference.block(name, described)(x, step, theirs[index])
        got = block(given, here, own[index])
        yield _error(f"layer {index}", got, wanted, wanted - x, settings, checkpoint)
        if plain is not None:
            is_same = has_same_bits(got, plain.block(name, described)(x, packed, others[index]))
            yield Finding(f"layer {index}", "fused against plain, bits", float(not is_same), 0.0)
        x = wanted
    assert spec.head is not None
    norm = None if spec.norm is None else spec.norm.build(reference, "norm")
    wanted = reference.head(spec.head, embedding)(x if norm is None else norm(x))
    given = x.to(embedded)
    got = model.logits(given if model.norm is None else model.norm(given))
    yield _error("head", got, wanted, wanted, settings, checkpoint)


def _error(
    part: str, got: Tensor, wanted: Tensor, scale: Tensor, settings: Resolved, checkpoint: Checkpoint | None
) -> Finding:
    """Compare with the size of `scale`, and of the rounding of what the layer adds it to."""
    limit = MAX_ERROR[name_storage(settings, checkpoint)]
    rounding = torch.finfo(got.dtype).eps / 2 / limit if got.dtype.itemsize < 4 else 0.0
    size = scale.float().abs() + rounding * wanted.float().abs()
    return Finding(part, "against float32", relative_error(got.float().to(CPU), wanted.float(), size), limit)


def name_storage(settings: Resolved, checkpoint: Checkpoint | None) -> str:
    """Name the coarsest rounding of weights, activations and cache."""
    stored = checkpoint.quantization.lower() if checkpoint else "float32"
    is_packed = settings.dtype == "auto" and stored not in ("float32", "bfloat16", "float16", "f32", "f16", "bf16")
    if settings.kv_cache_dtype == "int4":
        return "int4 cache"
    if settings.quantization or is_packed or settings.kv_cache_dtype in ("int8", "fp8"):
        return "packed"
    return "float32" if settings.dtype == settings.kv_cache_dtype == "float32" else "16"


def _open(checkpoint: Checkpoint | None, spec: ModelSpec, options: Options, ops: OpTable, settings: Resolved) -> Build:
    """Make what builds one layer after the other, read anew from the checkpoint."""
    if checkpoint is None:
        make = from_seed(spec, settings.seed, options.dtype, torch.device(settings.device))
        take = lambda name: make(name).to(CPU)  # noqa: E731  a device's random numbers are its own
        return Build(spec, ops, take, storage(ops, take, options, None, {}), CPU)
    sources = match(checkpoint, spec)
    take = from_checkpoint(checkpoint, sources, options.dtype)
    return Build(spec, ops, take, storage(ops, take, options, checkpoint, sources), CPU)


def compute_reference(
    checkpoint: Checkpoint | None, spec: ModelSpec, settings: Resolved, rows: Sequence[Sequence[int]]
) -> Tensor:
    """Compute the log probabilities [T, V] after every token of the sequences in float32, one layer in memory at a
    time."""
    reference = _open(checkpoint, spec, Options(torch.float32, None), ReferenceOps("cpu"), settings)
    step, memories = make_step(replace(spec, cache_dtypes=()), settings.block_size, "float32", rows)
    embedding = reference.embedding(spec.embedding)
    x = embedding(step)
    for index, described in enumerate(spec.layers):
        x = reference.block(f"layers.{index}", described)(x, step, memories[index])
    norm = None if spec.norm is None else spec.norm.build(reference, "norm")
    assert spec.head is not None
    return reference.head(spec.head, embedding)(x if norm is None else norm(x)).float().log_softmax(-1)


def make_step(
    spec: ModelSpec, block_size: int, kv_dtype: str, rows: Sequence[Sequence[int]], place: LayerDevice = HOST
) -> tuple[Step, list[Any]]:
    """Make a step of whole sequences with blocks of their own, and each layer's memory."""
    lengths = [len(row) for row in rows]
    grouping = group_layers(spec.states(LAYOUTS[kv_dtype]), block_size)
    slots: list[Any] = []
    tables, begin = [], 0
    for group in grouping.groups:
        each = [-(-length // block_size) if group.is_paged else group.blocks_per_state for length in lengths]
        table = torch.full((len(lengths), max(each)), -1, dtype=torch.int32)
        places = []
        for row, (length, count) in enumerate(zip(lengths, each)):
            table[row, :count] = torch.arange(begin, begin + count)
            places.append(begin * block_size + torch.arange(length))
            begin += count
        tables.append(table.to(place.device))
        slots.append(torch.cat(places).to(place.device) if group.is_paged else None)
    memory = BlockMemory(max(1, begin), block_size, grouping, kv_dtype, place.device)
    memory.blocks.zero_()
    ids = torch.tensor([id for row in rows for id in row])
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    ids, positions, starts, ends = (
        one.to(place.device) for one in (ids, positions, starts, torch.tensor(lengths, dtype=torch.int32))
    )
    step = Step(ids, positions, slots, tables, starts, ends, place.split(lengths))
    return step, memory.views(spec.memories())
