"""Compare each layer of a loaded model with plain ones: of the same weights, bit for bit, and in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from penstock.models.reading import from_checkpoint, from_seed
from penstock.models.spec import ModelSpec
from penstock.ops import OPS, OpTable
from penstock.runner.memory import BlockMemory
from penstock.runner.step import Step

LENGTHS = (33, 7, 1)  # of the sequences of the compared step
MAX_ERROR = {
    "float32": 1e-3,
    "16": 2e-2,
    "packed": 8e-2,
    "int4 cache": 0.3,
}  # relative to what a layer adds: see docs/verify.md


class ReferenceOps(OpTable):
    """Every op's reference, whatever the device has."""

    def __getattr__(self, name: str) -> Any:
        if name not in OPS:
            raise AttributeError(f"there is no op {name!r}")
        return OPS[name].reference


def compare_layers(model: Decoder, checkpoint: Checkpoint | None, settings: Resolved) -> Iterator[Finding]:
    """Give each layer the same inputs, those of the reference, and yield what comes of it."""
    spec, kept = model.spec, storage_options(settings)
    plain = _open(checkpoint, spec, kept, OpTable("cpu"), settings)
    reference = _open(checkpoint, spec, Options(torch.float32, None), ReferenceOps("cpu"), settings)
    size, kv = settings.block_size, settings.kv_cache_dtype
    rows = [[(7919 * at + length) % spec.vocab_size for at in range(length)] for length in LENGTHS]
    rows = [row[: spec.max_model_len] for row in rows]
    step, own = make_step(spec, size, kv, rows)
    _, theirs = make_step(replace(spec, cache_dtypes=()), size, "float32", rows)
    _, others = make_step(spec, size, kv, rows)
    embedding = reference.embedding(spec.embedding)
    x = embedding(step)
    yield _error("embedding", model.embedding(step), x, x, settings, checkpoint)
    for index, (described, block) in enumerate(zip(spec.layers, model.blocks)):
        name = f"layers.{index}"
        wanted = reference.block(name, described)(x, step, theirs[index])
        got = block(x, step, own[index])
        beside = plain.block(name, described)(x, step, others[index])
        yield _error(f"layer {index}", got, wanted, wanted - x, settings, checkpoint)
        is_same = has_same_bits(got, beside)
        yield Finding(f"layer {index}", "fused against plain, bits", float(not is_same), 0.0)
        x = wanted
    assert spec.head is not None
    norm = None if spec.norm is None else spec.norm.build(reference, "norm")
    wanted = reference.head(spec.head, embedding)(x if norm is None else norm(x))
    got = model.logits(x if model.norm is None else model.norm(x))
    yield _error("head", got, wanted, wanted, settings, checkpoint)


def _error(
    part: str, got: Tensor, wanted: Tensor, scale: Tensor, settings: Resolved, checkpoint: Checkpoint | None
) -> Finding:
    limit = MAX_ERROR[name_storage(settings, checkpoint)]
    return Finding(part, "against float32", relative_error(got.float(), wanted.float(), scale.float()), limit)


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
        take = from_seed(spec, settings.seed, options.dtype)
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


def make_step(spec: ModelSpec, block_size: int, kv_dtype: str, rows: Sequence[Sequence[int]]) -> tuple[Step, list[Any]]:
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
        tables.append(table)
        slots.append(torch.cat(places) if group.is_paged else None)
    memory = BlockMemory(max(1, begin), block_size, grouping, kv_dtype)
    memory.blocks.zero_()
    ids = torch.tensor([id for row in rows for id in row])
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    step = Step(ids, positions, slots, tables, starts, torch.tensor(lengths, dtype=torch.int32))
    return step, memory.views(spec.memories())
