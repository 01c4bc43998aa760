"""Metrics of the machine and of what was loaded: versions, memory, settings, energy, and sizes of steps."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.engine.messages import STEP_TOKENS
from penstock.host.machine import resident_bytes
from penstock.host.version import VERSION

if TYPE_CHECKING:
    from penstock.server.catalog import Catalog
    from penstock.server.engines.engine import RemoteEngine

CONFIG = ("block_size", "kv_cache_dtype", "kv_cache_tokens", "max_num_seqs", "max_model_len", "enable_prefix_caching")
LOADED = {  # metric: (help, the field of an engine's facts)
    "penstock:weights_bytes": ("Bytes of weights, as stored.", "num_bytes"),
    "penstock:kv_cache_bytes": ("Bytes of the KV cache.", "kv_cache_bytes"),
    "penstock:gpu_memory_bytes": ("GPU memory that the engine held when it was ready.", "gpu_bytes"),
    "penstock:weight_load_duration_seconds": ("Time from the engine's start until the model was loaded.", "load_s"),
}


ENGINE_LABELS = ["model_name", "replica"]


def list_engines(catalog: Catalog) -> list[tuple[list[str], RemoteEngine]]:
    """List all engines with the values of their labels."""
    fleets = [(model.name, model.engine.engines) for model in catalog if model.engine is not None]
    return [([name, str(number)], engine) for name, engines in fleets for number, engine in enumerate(engines)]


class MachineCollector:
    """Collects them on demand."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("penstock:build_info", "Versions.", labels=["version", "python"])
        build.add_metric([VERSION, platform.python_version()], 1)
        yield build
        engines = list_engines(self._catalog)
        yield _memory(engines)
        for name, (help, field) in LOADED.items():
            gauge = GaugeMetricFamily(name, help, labels=ENGINE_LABELS)
            for labels, engine in engines:
                if engine.facts is not None:
                    gauge.add_metric(labels, getattr(engine.facts, field))
            yield gauge
        config = GaugeMetricFamily(
            "penstock:cache_config_info", "The cache's settings.", labels=[*ENGINE_LABELS, *CONFIG]
        )
        for labels, engine in engines:
            if engine.facts is not None:
                values = {name: value for name, value, _ in engine.facts.settings}
                config.add_metric([*labels, *(str(values.get(name, "")).lower() for name in CONFIG)], 1)
        yield config
        yield _starts(engines)
        yield from _counters(engines)
        yield _steps(engines)
        yield from _ranks(engines)


def _memory(engines: Sequence[tuple[list[str], RemoteEngine]]) -> Metric:
    gauge = GaugeMetricFamily(
        "penstock:resident_memory_bytes",
        "Memory of our processes, maps of files included.",
        labels=["process", *ENGINE_LABELS],
    )
    pids = [(["api", "", ""], os.getpid()), *((["engine", *labels], engine.pid) for labels, engine in engines)]
    for labels, pid in pids:
        if pid is not None and (held := resident_bytes(pid)):
            gauge.add_metric(labels, held)
    return gauge


def _starts(engines: Sequence[tuple[list[str], RemoteEngine]]) -> Metric:
    gauge = GaugeMetricFamily(
        "penstock:startup_latency_breakdown_seconds",
        "Time of the engine's last start: imports, config, weights, and the engine with its cache and warm-up.",
        labels=[*ENGINE_LABELS, "phase"],
    )
    for labels, engine in engines:
        for phase, seconds in engine.facts.start_s.items() if engine.facts is not None else ():
            gauge.add_metric([*labels, phase], seconds)
    return gauge


def _ranks(engines: Sequence[tuple[list[str], RemoteEngine]]) -> Iterator[Metric]:
    """Describe the processes of models that have several ranks."""
    names = [*ENGINE_LABELS, "rank"]
    up = GaugeMetricFamily("penstock:rank_up", "1 while a rank of a model's several sends heartbeats.", labels=names)
    silence = GaugeMetricFamily("penstock:rank_silence_seconds", "Time since a rank's last heartbeat.", labels=names)
    losses = CounterMetricFamily("penstock:rank_losses", "Ranks whose loss ended an engine.", labels=ENGINE_LABELS)
    for labels, engine in engines:
        for one in engine.ranks.facts:
            up.add_metric([*labels, str(one.rank)], float(engine.ranks.is_up(one.rank)))
            silence.add_metric([*labels, str(one.rank)], engine.ranks.measure_silence(one.rank))
        if engine.ranks.facts:
            losses.add_metric(labels, engine.ranks.num_losses)
    yield from (up, silence, losses)


def _counters(engines: Sequence[tuple[list[str], RemoteEngine]]) -> Iterator[Metric]:
    cached = CounterMetricFamily(
        "penstock:prompt_tokens_cached", "Prompt tokens that were not computed again.", labels=ENGINE_LABELS
    )
    energy = CounterMetricFamily(
        "penstock:energy_joules", "Energy while requests ran, and while none did.", labels=[*ENGINE_LABELS, "state"]
    )
    for labels, engine in engines:
        cached.add_metric(labels, engine.total("num_cached_tokens"))
        if "busy_j" in engine.stats:
            energy.add_metric([*labels, "busy"], engine.total("busy_j"))
            energy.add_metric([*labels, "idle"], engine.total("idle_j"))
    yield cached
    yield energy


def _steps(engines: Sequence[tuple[list[str], RemoteEngine]]) -> Metric:
    family = HistogramMetricFamily("penstock:iteration_tokens_total", "Tokens per engine step.", labels=ENGINE_LABELS)
    for labels, engine in engines:
        total, buckets = 0.0, []
        for end in STEP_TOKENS:
            total += engine.total(f"num_steps_to_{end}")
            buckets.append((str(float(end)), total))
        buckets.append(("+Inf", total + engine.total("num_steps_beyond")))
        family.add_metric(labels, buckets, engine.total("num_step_tokens"))
    return family
