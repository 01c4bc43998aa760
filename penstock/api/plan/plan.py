"""The plan: a model's memory and speed on a device under a load, and the one change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.api.plan.costs import Matrices, Memories
from penstock.api.plan.devices import Device, known_gpus
from penstock.api.plan.fit import Fit, Subject, find_fit, fits_gpu
from penstock.api.plan.speed import Demand, Roofline, Speed, StepTimes, forecast_speed
from penstock.api.plan.timed import time_steps
from penstock.config import EngineConfig
from penstock.config.resolve import GPU_STEP_TOKENS
from penstock.errors import InvalidConfig, PenstockError

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256


@dataclass(frozen=True)
class TargetLoad:
    """The load to plan for. None: the usual lengths, or what the context has room for."""

    concurrency: int = 1
    prompt: int | None = None
    output: int | None = None

    def lengths(self, context: int) -> tuple[int, int, int]:
        """Return the tokens of a prompt and an answer, and those to have room for."""
        output = self.output or min(OUTPUT_TOKENS, max(1, context // 4))
        prompt = self.prompt or max(1, min(PROMPT_TOKENS, context - output))
        if prompt + output > context:
            raise InvalidConfig(
                f"a prompt of {prompt} and an answer of {output} tokens are {prompt + output}, over the context of "
                f"{context}: lower --prompt-tokens or --output-tokens, or raise --context"
            )
        return prompt, output, prompt + output if self.prompt or self.output else context


@dataclass(frozen=True)
class ReplicaCount:
    """Engines that divide the load; some of them share a device's memory."""

    count: int = 1
    sharers: int = 1  # of one device

    def share(self, device: Device) -> Device:
        """Return the part of a device that one engine has. How fast they are beside each other is not known."""
        if self.sharers == 1:
            return device
        return replace(device, memory_bytes=device.memory_bytes // self.sharers, bytes_s=0.0, ops_s=0.0)


ONE = ReplicaCount()


@dataclass(frozen=True)
class Change:
    """One change of the options that makes a model fit, as flags."""

    flags: str
    why: str


@dataclass(frozen=True)
class Forecast:
    device: Device
    fit: Fit
    load: Demand
    length: int  # of each request, that memory was counted for
    max_concurrency: int
    speed: Speed | None  # None: no speed of the device is known, it has several ranks, or the model makes embeddings
    change: Change | None  # None: it fits, or no single change would do
    replicas: ReplicaCount = ONE  # all else is of one of them


def make_plan(
    subject: Subject,
    config: EngineConfig,
    device: Device,
    target: TargetLoad,
    *,
    is_timed: bool,
    replicas: ReplicaCount = ONE,
) -> Forecast:
    """Plan for a device; with `is_timed` it is this CPU, whose steps are timed."""
    device, concurrency = replicas.share(device), -(-target.concurrency // replicas.count)
    context = subject.spec(config.max_model_len).max_model_len
    prompt, output, length = target.lengths(context)
    if target.prompt or target.output:
        config = replace(config, max_model_len=config.max_model_len or context)
    fit = find_fit(subject, config, device, length, concurrency)
    memory, settings = fit.memory, fit.settings
    load = Demand(concurrency, prompt, output, settings.max_num_seqs, settings.max_num_batched_tokens)
    change = None if memory.fits else _find_change(subject, config, device, fit, (length, concurrency, replicas))
    speed = None
    if not fit.spec.is_encoder and memory.fits and not fit.ranks and (device.bytes_s or is_timed):
        times: StepTimes = (
            time_steps(subject.checkpoint, fit.spec, settings, load)
            if is_timed
            else Roofline(
                device,
                Matrices.of(fit.model),
                Memories.of(fit.spec, settings.kv_cache_dtype),
                fit.spec.num_layers,
                settings.quantization == "fp8",
                memory.host,
            )
        )
        speed = forecast_speed(times, load)
    each = max(1, memory.needed_tokens // concurrency)
    return Forecast(device, fit, load, length, max(0, memory.max_cache_tokens) // each, speed, change, replicas)


def _find_change(
    subject: Subject, config: EngineConfig, device: Device, fit: Fit, load: tuple[int, int, ReplicaCount]
) -> Change | None:
    """Return the first single change that makes it fit, those that cost least first. `load`: length and number of one
    replica's requests, and the replicas."""
    length, concurrency, replicas = load

    def fits(
        config: EngineConfig, device: Device = device, length: int = length, concurrency: int = concurrency
    ) -> bool:
        try:
            if device.is_gpu:
                return fits_gpu(subject, config, device, length, concurrency)
            return find_fit(subject, config, device, length, concurrency).memory.fits
        except PenstockError:
            return False

    for flags, why, changed in _other_options(config, device):
        if fits(changed):
            return Change(flags, why)
    share = fit.memory.max_cache_tokens / max(1, fit.memory.needed_tokens)
    most = int(concurrency * share)
    if most > 0 and fits(config, concurrency=most):
        most *= replicas.count
        return Change(f"--concurrency {most}", f"memory has room for {most} at once")
    longest = int(length * share) // MIN_CONTEXT * MIN_CONTEXT
    if concurrency == 1 and longest > 0 and fits(replace(config, max_model_len=longest), length=longest):
        return Change(f"--context {longest}", f"memory has room for one request of {longest} tokens")
    if not device.is_gpu:
        of_all = f" of all {replicas.count} replicas" if replicas.count > 1 else ""
        gib = -(-fit.memory.total * replicas.sharers // (1 << 30))
        return Change(f"--memory {gib}G", f"{gib} GiB hold weights and cache{of_all}")
    for size in HOST_GIB:
        if not config.cpu_offload_gb and fits(replace(config, cpu_offload_gb=size)):
            return Change(f"--cpu-offload-gb {size}", "so much of the weights stays in host memory; steps wait for it")
    for other in known_gpus():
        if other.memory_bytes > device.memory_bytes and fits(config, other):
            name = other.name.removeprefix("NVIDIA ").replace(" ", "-")
            return Change(f"--gpu {name}", f"it has {other.memory_bytes / (1 << 30):.0f} GiB")
    return None


MIN_CONTEXT = 256
HOST_GIB = (4, 8, 16, 32)  # of weights; with more, a larger GPU is the better advice
FEW_TOKENS = 2048  # of a step


def _other_options(config: EngineConfig, device: Device) -> Iterator[tuple[str, str, EngineConfig]]:
    """Yield options that take less memory: flags, the price, and the config."""
    if device.is_gpu and (config.max_num_batched_tokens or GPU_STEP_TOKENS) > FEW_TOKENS:
        yield (
            f"--max-num-batched-tokens {FEW_TOKENS}",
            "steps take less memory, and long prompts more steps",
            replace(config, max_num_batched_tokens=FEW_TOKENS),
        )
    small = "fp8" if device.is_gpu and device.capability >= (8, 9) else None if device.is_gpu else "int8"
    if small and config.kv_cache_dtype != small:
        yield (
            f"--kv-cache-dtype {small}",
            "the cache takes half the memory, at a small loss of precision",
            replace(config, kv_cache_dtype=small),
        )
    for kind, why in (
        ("fp8", "weights take half the memory, at a small loss"),
        ("int8", "weights take half the memory, at next to no loss"),
        ("int4", "weights take a third of the memory, at some loss of quality"),
    ):
        is_possible = kind != "fp8" or (device.is_gpu and device.capability >= (8, 9))
        if is_possible and config.quantization is None:
            yield f"--quantization {kind}", why, replace(config, quantization=kind)
