"""`penstock plan`: forecast memory and speed of a model on a machine, from its headers alone."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.commands.flags.options import Json, Model, config_options, engine_options
from penstock.commands.machine.ranks import add_ranks
from penstock.commands.output import Table, write_text
from penstock.config import EngineConfig, check_options, option
from penstock.errors import InvalidConfig

if TYPE_CHECKING:
    from penstock.api.plan.devices import Device
    from penstock.api.plan.plan import Forecast, ReplicaCount

GIB = 1 << 30
DOES_NOT_FIT = 1  # exit status
LEFT_OUT = """
    tokenizer chat_template skip_tokenizer_init parse_special_tokens device kv_cache_tokens max_model_len
    enable_prefix_caching scheduling_policy capacity speculative_config generation_config override_generation_config
    seed distributed_executor_backend
""".split()


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `penstock plan` beside the engine's."""

    gpu: str | None = option(None, "GPU to plan for, such as H200, L4 or RTX-4090 (default: this machine)")
    memory: str | None = option(None, "memory of the device, such as 24G (default: the GPU's, or what is free here)")
    context: int | None = option(
        None, "longest request, prompt and answer (default: the model's)", least=1, most=2**31 - 1
    )
    concurrency: int = option(1, "requests at once", least=1, most=65535)
    data_parallel_size: int = option(1, "engines that share the requests", least=1, most=64)
    prompt_tokens: int | None = option(None, "tokens of a prompt (default: 512, or what fits)", least=1, most=2**31 - 1)
    output_tokens: int | None = option(
        None, "tokens of an answer (default: 256, or what fits)", least=1, most=2**31 - 1
    )
    bandwidth: float | None = option(
        None, "GB/s that the device reads (default: known or measured)", least=0.1, most=1e6
    )
    tflops: float | None = option(None, "TFLOP/s that it multiplies, with --bandwidth", least=0.001, most=1e6)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.bandwidth is None) != (self.tflops is None):
            raise InvalidConfig("--bandwidth and --tflops need each other: give both")

    @classmethod
    def from_options(cls, **options: Any) -> PlanOptions:
        return cls(**options)


@config_options(PlanOptions, "wanted")
@engine_options(*LEFT_OUT)
def plan(model: Model, as_json: Json = False, *, options: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Forecast a model's memory and speed, from its headers alone.

    Neither the weights nor the device are needed. Of a repository on the Hugging Face hub only the headers are read.
    Exit status 1 means that the model does not fit.
    """
    from penstock.api.plan.plan import TargetLoad, make_plan

    asked = PlanOptions.from_options(**wanted)
    config = EngineConfig.from_options(**options, **({"max_model_len": asked.context} if asked.context else {}))
    device, is_timed = _find_device(asked)
    with tempfile.TemporaryDirectory(prefix="penstock-plan-") as folder:
        subject = _open(model, config, Path(folder))
        try:
            target = TargetLoad(asked.concurrency, asked.prompt_tokens, asked.output_tokens)
            replicas = _count_replicas(asked, device)
            is_timed = is_timed and replicas.count == 1
            forecast = make_plan(subject, config, device, target, is_timed=is_timed, replicas=replicas)
        finally:
            if subject.checkpoint is not None:
                subject.checkpoint.close()
    facts = {"model": model, **describe(forecast)}
    write_text(json.dumps(facts, indent=2) + "\n" if as_json else _lines(model, forecast))
    if not forecast.fit.memory.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _open(model: str, config: EngineConfig, folder: Path) -> Any:
    from penstock.api.plan.fit import Subject
    from penstock.hub.headers import find_headers
    from penstock.models.files import open_checkpoint, read_config

    path = find_headers(model, config.revision, folder, lambda path: open_checkpoint(path).close())
    if config.load_format == "dummy" and path.is_dir():
        return Subject(read_config(path), None)
    checkpoint = open_checkpoint(path)
    return Subject(checkpoint.config, checkpoint)


def _find_device(options: PlanOptions) -> tuple[Device, bool]:
    """Return the device, and True if its steps are to be timed here."""
    from penstock.api.plan.devices import find_gpu, here, parse_memory

    device = find_gpu(options.gpu) if options.gpu else here(options.memory is None)
    if options.memory is not None:
        device = replace(device, memory_bytes=parse_memory(options.memory))
    if options.bandwidth is not None and options.tflops is not None:
        device = replace(device, bytes_s=options.bandwidth * 1e9, ops_s=options.tflops * 1e12)
    return device, not device.is_gpu and not device.bytes_s


def _count_replicas(asked: PlanOptions, device: Device) -> ReplicaCount:
    """Say how engines share devices: a GPU asked for by name is there for each, those here are dealt out."""
    from penstock.api.plan.plan import ReplicaCount
    from penstock.host.gpus import list_gpus

    count = asked.data_parallel_size
    num_devices = count if asked.gpu else max(1, len(list_gpus(os.environ))) if device.is_gpu else 1
    return ReplicaCount(count, -(-count // num_devices))


def describe(forecast: Forecast) -> dict[str, Any]:
    """Describe a forecast as one JSON document."""
    memory, settings, speed = forecast.fit.memory, forecast.fit.settings, forecast.speed
    facts: dict[str, Any] = {
        "device": forecast.device.name,
        "fits": memory.fits,
        "memory_bytes": {
            "weights": memory.weights,
            "kv_cache": memory.cache,
            "steps": memory.step,
            "process": memory.process,
            "total": memory.total,
            "limit": memory.limit,
            **({"host": memory.host} if memory.host else {}),
        },
        "kv_cache_tokens": {"needed": memory.needed_tokens, "room": max(0, memory.max_cache_tokens)},
        "load": {
            "concurrency": forecast.load.concurrency,
            "tokens_per_request": forecast.length,
            "prompt_tokens": forecast.load.prompt,
            "output_tokens": forecast.load.output,
        },
        "max_concurrency": forecast.max_concurrency,
        "settings": {
            name: getattr(settings, name)
            for name in ("dtype", "quantization", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens")
        },
    }
    if forecast.replicas.count > 1:
        facts["replicas"] = {"count": forecast.replicas.count, "on_a_device": forecast.replicas.sharers}
        facts["replicas"]["memory_bytes"] = memory.total * forecast.replicas.count
    if forecast.fit.ranks:
        facts["ranks"] = [each.describe() for each in forecast.fit.ranks]
    if forecast.change is not None:
        facts["change"] = {"flags": forecast.change.flags, "why": forecast.change.why}
    if speed is not None:
        facts["speed"] = {
            "prefill_tokens_per_s": round(speed.prefill_tokens_s, 1),
            "ttft_ms": round(1e3 * speed.ttft_s, 1),
            "ttft_ms_of_the_last": round(1e3 * speed.burst_ttft_s, 1),
            "tpot_ms": round(1e3 * speed.tpot_s, 2),
            "decode_tokens_per_s": round(speed.decode_tokens_s, 1),
            "decode_tokens_per_s_alone": round(speed.single_tokens_s, 1),
            "output_tokens_per_s": round(speed.output_tokens_s, 1),
            "bound": {name: round(share, 3) for name, share in speed.bound.items()},
        }
    return facts


def _lines(model: str, forecast: Forecast) -> str:
    memory, load, speed = forecast.fit.memory, forecast.load, forecast.speed
    table = Table()
    table.add("model", f"{model} ({forecast.fit.spec.architecture})")
    table.add("device", f"{forecast.device.name}, {_gib(forecast.device.memory_bytes)}")
    if forecast.replicas.count > 1:
        count, sharers = forecast.replicas.count, forecast.replicas.sharers
        shared = "each on a device of its own" if sharers == 1 else f"{sharers} share the device's memory"
        table.add("replicas", f"{count}, {shared}; all below is of one, and all take {_gib(memory.total * count)}")
    if memory.limit != forecast.device.memory_bytes:
        table.add("for the engine", f"{_gib(memory.limit)} (--gpu-memory-utilization)")
    table.add("weights", _gib(memory.weights) + (f", and {_gib(memory.host)} in host memory" if memory.host else ""))
    table.add("KV cache", f"{_gib(memory.cache)}: {load.concurrency} × {forecast.length} tokens")
    table.add("steps", _gib(memory.step) + (f", and {_gib(memory.process)} for the process" if memory.process else ""))
    table.add("total", _gib(memory.total))
    add_ranks(table, [each.describe() for each in forecast.fit.ranks])
    table.add("fits", _verdict(forecast))
    if forecast.change is not None:
        table.add("what would do", f"{forecast.change.flags} ({forecast.change.why})")
    elif not memory.fits:
        table.add("what would do", "no single change; combine a smaller format with fewer or shorter requests")
    if speed is not None:
        bound = sorted(speed.bound.items(), key=lambda item: -item[1])
        table.add("prefill", f"{speed.prefill_tokens_s:,.0f} tokens/s: first token after {_ms(speed.ttft_s)}")
        if load.concurrency > 1:
            table.add("all at once", f"the last first token after {_ms(speed.burst_ttft_s)}")
        table.add("decode", f"{speed.decode_tokens_s:,.1f} tokens/s, {_ms(speed.tpot_s)} per token and request")
        if load.concurrency > 1:
            table.add("decode alone", f"{speed.single_tokens_s:,.1f} tokens/s")
        shares = f"{load.concurrency} × {load.prompt} in, {load.output} out"
        table.add(
            "the whole load" if forecast.replicas.count == 1 else "its load",
            f"{speed.output_tokens_s:,.1f} output tokens/s ({shares})",
        )
        table.add("bound by", ", ".join(f"{name} {share:.0%}" for name, share in bound if share >= 0.05))
    return table.plain()


def _verdict(forecast: Forecast) -> str:
    memory = forecast.fit.memory
    if not memory.fits:
        return "no" if memory.max_cache_tokens > 0 else "no: the weights alone leave no room"
    flag = ""
    if not forecast.device.is_gpu and memory.needed_tokens > forecast.fit.settings.kv_cache_tokens:
        flag = f"; set --kv-cache-tokens {memory.needed_tokens}"
    most = f"; {forecast.max_concurrency} such requests at once at most" if memory.needed_tokens else ""
    return f"yes{most}{flag}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
