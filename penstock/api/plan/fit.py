"""The memory that a model takes under some options, by the engine's own accounting, and what it leaves for a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.api.assemble import bytes_per_token
from penstock.api.drafting import group_states
from penstock.api.engine.keep import keep_layers
from penstock.api.engine.load import DTYPES, META
from penstock.api.plan.devices import Device
from penstock.api.plan.ranks import RankUse, list_ranks
from penstock.cache.group import Grouping
from penstock.config import EngineConfig, Facts, GpuFacts, Resolved, resolve
from penstock.config.resolve import gpu_room, offload_use
from penstock.models.decoder import Decoder, Encoder
from penstock.models.files import Checkpoint
from penstock.models.load import Options
from penstock.models.spec import ModelSpec, spec_from_config
from penstock.ops import cpu
from penstock.passes.load import load_lowered
from penstock.passes.outline import blank_model, count_packed_bytes, weight_bytes

GIB = 1 << 30
AMPLE = 1 << 60
PROCESS_BYTES = 252 << 20  # Python and torch, of an engine on a CPU: see docs/plan.md


@dataclass(frozen=True)
class Subject:
    """A model's headers. Without a checkpoint there is only a config: weights are random."""

    described: Mapping[str, Any]
    checkpoint: Checkpoint | None

    def spec(self, context: int | None) -> ModelSpec:
        return spec_from_config(self.described, context)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by what they are for; `fits` says if they are there."""

    weights: int
    cache: int  # that the requests need
    step: int  # results of a step, sampling and, on a GPU, reserves
    process: int
    limit: int
    max_cache_tokens: int  # that memory has room for
    needed_tokens: int
    host: int = 0  # weights in the host's memory, beside a GPU

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.step + self.process

    @property
    def fits(self) -> bool:
        return self.max_cache_tokens >= self.needed_tokens


@dataclass(frozen=True)
class Fit:
    spec: ModelSpec
    settings: Resolved
    model: Decoder | Encoder
    memory: MemoryUse
    ranks: tuple[RankUse, ...] = ()  # if there are several


def needed_blocks(grouping: Grouping, length: int, settings: Resolved) -> int:
    """Count the blocks that one sequence of `length` holds at once."""
    size, total = settings.block_size, 0
    for group in grouping.groups:
        if group.is_paged:
            total += group.spec.max_blocks(length, min(settings.max_num_batched_tokens, length), size)
        else:
            total += group.blocks_per_state
    return total


def fits_gpu(subject: Subject, config: EngineConfig, device: Device, length: int, concurrency: int) -> bool:
    """Say if a GPU has room, by the engine's own rule, without building the model."""
    given = replace(config, device="cuda", kv_cache_tokens=None)
    spec = subject.spec(config.max_model_len)
    facts, gpu = _facts(subject, spec, given, device)
    assert gpu is not None
    settings = resolve(given, replace(facts, gpu=replace(gpu, total_bytes=AMPLE, free_bytes=AMPLE)))
    spec = keep_layers(subject.spec(settings.max_model_len), settings)
    return gpu_room(given, facts)[2] >= _needed_tokens(spec, settings, length, concurrency)


def _needed_tokens(spec: ModelSpec, settings: Resolved, length: int, concurrency: int) -> int:
    grouping = group_states(spec, settings.kv_cache_dtype, settings.block_size, None)
    blocks = needed_blocks(grouping, length, settings) * concurrency
    return -(-blocks * settings.block_size // max(1, len(grouping.groups)))


def find_fit(subject: Subject, config: EngineConfig, device: Device, length: int, concurrency: int) -> Fit:
    """Resolve the options for the device and count; `length` is of each of the requests at once."""
    given = replace(config, device="cuda" if device.is_gpu else "cpu")
    spec = subject.spec(config.max_model_len)
    facts, gpu = _facts(subject, spec, given, device)
    roomy = replace(facts, gpu=replace(gpu, total_bytes=AMPLE, free_bytes=AMPLE)) if gpu else facts
    settings = resolve(given, roomy)  # settings first, room for them afterwards
    if settings.max_model_len != spec.max_model_len:
        spec = subject.spec(settings.max_model_len)
    spec = keep_layers(spec, settings)
    model = outline_model(subject.checkpoint, spec, settings)
    grouping = group_states(spec, settings.kv_cache_dtype, settings.block_size, None)
    per_token = max(1, bytes_per_token(spec, settings))
    needed = _needed_tokens(spec, settings, length, concurrency)
    ranks = list_ranks(subject.checkpoint, spec, settings)
    weights = gpu.packed_bytes if gpu and gpu.packed_bytes and settings.keeps_packed else weight_bytes(model)
    host = 0
    if gpu is not None:
        offload = offload_use(given, gpu)
        host, weights = offload.host_bytes, weights - offload.host_bytes + offload.buffer_bytes
        free = replace(given, kv_cache_tokens=None)
        ample, counted, held = gpu_room(free, roomy)
        (limit, _, most), step, process = gpu_room(free, facts), ample - counted - held * per_token, 0
    else:
        logits = 0 if spec.is_encoder else 4 * spec.vocab_size * min(settings.max_num_seqs, concurrency)
        step = spec.scratch_bytes(4) * settings.max_num_batched_tokens + logits
        limit, process = device.memory_bytes, PROCESS_BYTES * max(1, len(ranks))
        weights = sum(each.weight_bytes for each in ranks) or weights
        step *= max(1, len(ranks))
        most = max(-1, limit - weights - process - step) // per_token
    keeps = bool(grouping.groups)
    memory = MemoryUse(weights, needed * per_token * keeps, step, process, limit, most, needed if keeps else 0, host)
    return Fit(spec, settings, model, memory, tuple(ranks))


def _facts(subject: Subject, spec: ModelSpec, config: EngineConfig, device: Device) -> tuple[Facts, GpuFacts | None]:
    gpu = None
    if device.is_gpu:
        from penstock.runner.cuda.gpu import known_facts

        stored = str(subject.described.get("dtype") or subject.described.get("torch_dtype") or "")
        known = known_facts(spec, stored, device.name, device.memory_bytes, device.capability)
        packed = count_packed_bytes(subject.checkpoint, spec, known.has_fp8) if subject.checkpoint else 0
        gpu = replace(known, packed_bytes=packed)
    per_token, cores = bytes_per_token(spec, config), cpu.available_cores()
    host_bytes = AMPLE if device.is_gpu else device.memory_bytes
    facts = Facts(spec.max_positions, per_token, host_bytes, cores, spec.is_encoder, gpu=gpu)
    return replace(facts, num_layers=spec.num_layers), gpu


def storage_options(settings: Resolved) -> Options:
    """Return the storage of weights on a CPU."""
    return Options(DTYPES.get(settings.dtype), settings.quantization, settings.activation_dtype == "int8")


def outline_model(checkpoint: Checkpoint | None, spec: ModelSpec, settings: Resolved) -> Decoder | Encoder:
    """Build the model for its device with weights that have sizes only."""
    if settings.device == "cpu":
        return blank_model(checkpoint, spec, storage_options(settings), META)
    return load_lowered(
        None,
        spec,
        dtype=DTYPES[settings.dtype],
        quantization=settings.quantization,
        dummy_seed=0,
        device=META,
        exact=settings.deterministic,
    )
