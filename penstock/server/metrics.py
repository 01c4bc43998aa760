"""Prometheus metrics, with vLLM's names under `penstock:`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.config import EngineConfig
from penstock.server.engines.fleet import sum_totals
from penstock.server.histogram import GapHistogram, LoopHistogram
from penstock.server.machine_metrics import ENGINE_LABELS, MachineCollector, list_engines

if TYPE_CHECKING:
    from penstock.server.catalog import Catalog
    from penstock.server.engines.engine import RemoteEngine
    from penstock.server.generation import Generation

# vLLM's buckets
FIRST_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
FIRST_S += [20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
GAP_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5]
GAP_S += [10.0, 20.0, 40.0, 80.0]
WHOLE_S = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0]
WHOLE_S += [960.0, 1920.0, 7680.0]
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
PROMPTS = "penstock:request_prompt_tokens"
OUTPUTS = "penstock:request_generation_tokens"
TTFT = "penstock:time_to_first_token_seconds"
GAP = "penstock:inter_token_latency_seconds"
PER_TOKEN = "penstock:request_time_per_output_token_seconds"
OLD_PER_TOKEN = "penstock:time_per_output_token_seconds"
E2E = "penstock:e2e_request_latency_seconds"
QUEUE = "penstock:request_queue_time_seconds"
PREFILL = "penstock:request_prefill_time_seconds"
DECODE = "penstock:request_decode_time_seconds"
INFERENCE = "penstock:request_inference_time_seconds"
GRAMMAR = "penstock:grammar_compilation_time_seconds"
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    PROMPTS: ("Prompt tokens per request.", TOKENS),
    OUTPUTS: ("Generated tokens per request.", TOKENS),
    TTFT: ("Time from arrival to the first token.", FIRST_S),
    PER_TOKEN: ("Time per token after the first, per request.", GAP_S),
    OLD_PER_TOKEN: ("The same, by vLLM's older name.", GAP_S),
    E2E: ("Time from arrival to the last token.", WHOLE_S),
    QUEUE: ("Time until a request is first run.", WHOLE_S),
    PREFILL: ("Time from there to the first token.", WHOLE_S),
    DECODE: ("Time from the first to the last token.", WHOLE_S),
    GRAMMAR: ("Time to try and compile an answer's grammar, per request that has one.", FIRST_S),
    INFERENCE: ("Time from the first run to the last token.", WHOLE_S),
}
CONNECTION_REFUSALS = ("seats", "descriptors")  # connection slots, or file descriptors

# metric: (help, the engine's name)
GAUGES = {
    "penstock:num_requests_running": ("Running sequences.", "num_running"),
    "penstock:kv_offload_memory_bytes": ("Memory that the store of KV cache blocks fills.", "num_store_bytes"),
    "penstock:kv_offload_file_bytes": ("Bytes of its files.", "num_store_file_bytes"),
}
RATIOS = {  # metric: (help, and the engine's names of a part and of the whole)
    "penstock:kv_cache_usage_perc": ("Fraction of KV cache blocks in use.", "num_used_blocks", "num_blocks"),
    "penstock:token_usage": ("The same, by SGLang's name.", "num_used_blocks", "num_blocks"),
    "penstock:cache_hit_rate": (
        "Fraction of prompt tokens found in the prefix cache, since the engine's start.",
        "num_cached_tokens",
        "num_prompt_tokens",
    ),
}
COUNTERS = {
    "penstock:num_preemptions": ("Preempted sequences.", "num_preemptions"),
    "penstock:prompt_tokens": ("Prompt tokens.", "num_prompt_tokens"),
    "penstock:generation_tokens": ("Generated tokens.", "num_output_tokens"),
    "penstock:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
    "penstock:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "num_cached_tokens"),
    "penstock:kv_offload_saved_blocks": ("KV cache blocks saved to the store.", "num_saved_blocks"),
    "penstock:kv_offload_restored_tokens": ("Prompt tokens restored from the store.", "num_restored_tokens"),
    "penstock:kv_offload_hits": ("Blocks that the store was asked for and had.", "num_store_hits"),
    "penstock:kv_offload_misses": ("Blocks that were lost or damaged when asked for.", "num_store_misses"),
    "penstock:kv_transfer_sent_blocks": ("Blocks that other servers fetched here.", "num_sent_blocks"),
    "penstock:kv_transfer_fetched_blocks": ("Blocks fetched from other servers.", "num_fetched_blocks"),
    "penstock:kv_transfer_fetched_bytes": ("Bytes of those.", "num_fetched_bytes"),
    "penstock:kv_transfer_missing_blocks": (
        "Blocks that other servers were asked for and did not send whole.",
        "num_missing_blocks",
    ),
    "penstock:kv_transfer_milliseconds": ("Time that requests waited for fetched blocks.", "fetch_ms"),
    "penstock:engine_steps": ("Engine steps.", "num_steps"),
    "penstock:spec_decode_num_drafts": ("Rows that verified draft tokens.", "num_drafts"),
    "penstock:spec_decode_num_draft_tokens": ("Draft tokens that were verified.", "num_draft_tokens"),
    "penstock:spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.", "num_accepted_tokens"),
}
PER_POSITION = "penstock:spec_decode_num_accepted_tokens_per_pos"
PER_DRAFTER = {
    "penstock:spec_decode_num_draft_tokens_per_drafter": ("Draft tokens that were verified.", "num_draft_tokens_of_"),
    "penstock:spec_decode_num_accepted_tokens_per_drafter": (
        "Draft tokens that were accepted.",
        "num_accepted_tokens_of_",
    ),
}
NUM_POSITIONS = 8  # of a draft that the engine counts by


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ended = Counter(
            "penstock:request_success",
            "Finished sequences, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "penstock:requests_refused", "Refused requests, by HTTP status.", ["status"], registry=self.registry
        )
        self._http = Counter(
            "penstock:http_requests",
            "HTTP requests, by route, method and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._connections = Counter(
            "penstock:connections_refused", "Refused connections, by reason.", ["reason"], registry=self.registry
        )
        for reason in CONNECTION_REFUSALS:
            self._connections.labels(reason)
        self.gaps = GapHistogram(GAP, "Time between tokens.", GAP_S)
        self._histograms = {name: LoopHistogram(name, *one) for name, one in HISTOGRAMS.items()}
        for histogram in self._histograms.values():
            self.registry.register(histogram)
        self.registry.register(self.gaps)

    def sum_latencies(self, model: str) -> dict[str, float]:
        """Return the sums and counts of times to first tokens, and between tokens."""
        num_ttft, ttft_s = self._histograms[TTFT].total(model)
        _, tpot_s = self.gaps.total(model)
        return {"num_ttft": num_ttft, "ttft_s": ttft_s, "num_tpot": self.gaps.num_tokens[model], "tpot_s": tpot_s}

    def add_models(self, catalog: Catalog) -> None:
        """Create every model's series at once, so that rates start at zero."""
        for model in catalog:
            for histogram in (*self._histograms.values(), self.gaps):
                histogram.add_model(model.name)
        self.registry.register(_EngineCollector(catalog))
        self.registry.register(MachineCollector(catalog))

    def count_refusal(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def count_http(self, route: str, method: str, status: int) -> None:
        self._http.labels(route, method, str(status)).inc()

    def count_refused_connection(self, reason: str) -> None:
        self._connections.labels(reason).inc()

    def count_end(self, model: str, finish_reason: str) -> None:
        self._ended.labels(model, finish_reason).inc()

    def observe_first(self, model: str, seconds: float) -> None:
        """Record the time to a first token, when that has come."""
        self._histograms[TTFT].observe(model, max(0.0, seconds))

    def observe(self, model: str, generation: Generation) -> None:
        """Record the latencies and token counts of a finished request."""
        times, usage, trace = generation.times, generation.usage, generation.trace
        observed: dict[str, float] = {PROMPTS: usage.num_prompt, OUTPUTS: usage.num_output}
        if times.first_s is not None and times.end_s is not None:
            run_s = trace.run_s
            observed |= {E2E: times.end_s - times.begun_s, DECODE: times.end_s - times.first_s}
            if usage.num_output > 1:
                observed[PER_TOKEN] = observed[OLD_PER_TOKEN] = observed[DECODE] / (usage.num_output - 1)
            if run_s is not None:
                observed |= {
                    QUEUE: run_s - times.begun_s,
                    PREFILL: times.first_s - run_s,
                    INFERENCE: times.end_s - run_s,
                }
        if "grammar" in trace.sums:
            observed[GRAMMAR] = trace.sums["grammar"]
        for name, value in observed.items():
            self._histograms[name].observe(model, max(0.0, value))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    """Collects the engines' own counters on demand."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterator[Metric]:
        fleets = {model.name: model.engine for model in self._catalog if model.engine is not None}
        engines = list_engines(self._catalog)
        for name, (help, key) in GAUGES.items():
            gauge = GaugeMetricFamily(name, help, labels=ENGINE_LABELS)
            for labels, engine in engines:
                gauge.add_metric(labels, engine.stats.get(key, 0))
            yield gauge
        for name, (help, part, whole) in RATIOS.items():
            gauge = GaugeMetricFamily(name, help, labels=ENGINE_LABELS)
            for labels, engine in engines:
                gauge.add_metric(labels, engine.stats.get(part, 0) / max(1, engine.stats.get(whole, 1)))
            yield gauge
        for name, (help, key) in COUNTERS.items():
            counter = CounterMetricFamily(name, help, labels=ENGINE_LABELS)
            for labels, engine in engines:
                counter.add_metric(labels, engine.total(key))
            yield counter
        accepted = CounterMetricFamily(
            PER_POSITION, "Accepted draft tokens, by place in the draft.", labels=["model_name", "position"]
        )
        for model, fleet in fleets.items():
            for place in range(NUM_POSITIONS):
                accepted.add_metric([model, str(place)], fleet.total(f"num_accepted_at_{place}"))
        yield accepted
        for name, (help, prefix) in PER_DRAFTER.items():
            counter = CounterMetricFamily(name, help, labels=["model_name", "drafter"])
            for model, fleet in fleets.items():
                for drafter, count in sum_totals(fleet, prefix).items():
                    counter.add_metric([model, drafter], count)
            yield counter
        waiting = GaugeMetricFamily("penstock:num_requests_waiting", "Waiting requests.", labels=["model_name"])
        for model, fleet in fleets.items():
            waiting.add_metric([model], len(fleet.admission) + fleet.stats.get("num_waiting", 0))
        yield waiting
        yield from _count_states(engines)
        yield from _count_loras(self._catalog)


def _count_states(engines: Sequence[tuple[list[str], RemoteEngine]]) -> Iterator[Metric]:
    """Describe which engines are up, and how often they were restarted."""
    ready = GaugeMetricFamily("penstock:engine_ready", "1 while the engine responds.", labels=ENGINE_LABELS)
    restarts = CounterMetricFamily("penstock:engine_restarts", "Engine restarts.", labels=ENGINE_LABELS)
    for labels, engine in engines:
        ready.add_metric(labels, float(engine.is_ready))
        restarts.add_metric(labels, engine.num_restarts)
    yield from (ready, restarts)


def _count_loras(catalog: Catalog) -> Iterator[Metric]:
    """Describe the adapters in use, as vLLM does: names in labels, the time as the value."""
    info = GaugeMetricFamily(
        "penstock:lora_requests_info",
        "Adapters of running and of waiting requests; the value is the time.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters", "model_name"],
    )
    loads = CounterMetricFamily("penstock:lora_loads", "Adapters that were read from disk.", labels=["model_name"])
    evictions = CounterMetricFamily(
        "penstock:lora_evictions", "Adapters whose memory was freed for others.", labels=["model_name"]
    )
    for model in catalog:
        if model.engine is None or not model.loras.is_enabled:
            continue
        engine = model.engine
        running, waiting = (
            ",".join(sorted({use.name for flight in flights for use in flight.request.loras}))
            for flights in (engine.dispatcher.flights.values(), engine.admission)
        )
        max_loras = str(engine.options.get("max_loras", EngineConfig.max_loras))
        info.add_metric([max_loras, running, waiting, model.name], time.time())
        loads.add_metric([model.name], engine.total("num_lora_loads"))
        evictions.add_metric([model.name], engine.total("num_lora_evictions"))
    yield from (info, loads, evictions)
