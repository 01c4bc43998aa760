"""Prometheus metrics, with vLLM's names under `penstock:`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.server.engines.engine import sum_totals
from penstock.server.histogram import LoopHistogram

if TYPE_CHECKING:
    from penstock.server.catalog import Catalog
    from penstock.server.generation import Generation

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
CONNECTION_REFUSALS = ("seats", "descriptors")  # connection slots, or file descriptors

# metric: (help, the engine's name)
GAUGES = {
    "penstock:num_requests_running": ("Running sequences.", "num_running"),
    "penstock:kv_cache_usage_perc": ("Fraction of KV cache blocks in use.", ""),
}
COUNTERS = {
    "penstock:num_preemptions": ("Preempted sequences.", "num_preemptions"),
    "penstock:prompt_tokens": ("Prompt tokens.", "num_prompt_tokens"),
    "penstock:generation_tokens": ("Generated tokens.", "num_output_tokens"),
    "penstock:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
    "penstock:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "num_cached_tokens"),
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
        names = ["model_name"]
        self._ended = Counter(
            "penstock:request_success",
            "Finished sequences, by reason.",
            [*names, "finished_reason"],
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
        self._first = self._make_histogram(
            "penstock:time_to_first_token_seconds", "Time from arrival to the first token."
        )
        self._between = LoopHistogram("penstock:inter_token_latency_seconds", "Time between tokens.", SECONDS)
        self.registry.register(self._between)
        self.observe_gap = self._between.observe  # of a model: seconds between tokens
        self._whole = self._make_histogram(
            "penstock:e2e_request_latency_seconds", "Time from arrival to the last token."
        )
        self._per_token = self._make_histogram(
            "penstock:time_per_output_token_seconds", "Time per token after the first."
        )
        self._prompts = Histogram(
            "penstock:request_prompt_tokens",
            "Prompt tokens per request.",
            names,
            buckets=TOKENS,
            registry=self.registry,
        )
        self._outputs = Histogram(
            "penstock:request_generation_tokens",
            "Generated tokens per request.",
            names,
            buckets=TOKENS,
            registry=self.registry,
        )

    def _make_histogram(self, name: str, help: str) -> Histogram:
        return Histogram(name, help, ["model_name"], buckets=SECONDS, registry=self.registry)

    def add_models(self, catalog: Catalog) -> None:
        """Create every model's series at once, so that rates start at zero."""
        for model in catalog:
            self._between.add_model(model.name)
            for series in (self._first, self._whole, self._per_token, self._prompts, self._outputs):
                series.labels(model.name)
        self.registry.register(_EngineCollector(catalog))

    def count_refusal(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def count_http(self, route: str, method: str, status: int) -> None:
        self._http.labels(route, method, str(status)).inc()

    def count_refused_connection(self, reason: str) -> None:
        self._connections.labels(reason).inc()

    def count_end(self, model: str, finish_reason: str) -> None:
        self._ended.labels(model, finish_reason).inc()

    def observe(self, model: str, generation: Generation) -> None:
        """Record the latencies and token counts of a finished request."""
        times, usage = generation.times, generation.usage
        self._prompts.labels(model).observe(usage.num_prompt)
        self._outputs.labels(model).observe(usage.num_output)
        if times.first_s is None or times.end_s is None:
            return
        self._first.labels(model).observe(times.first_s - times.begun_s)
        self._whole.labels(model).observe(times.end_s - times.begun_s)
        if usage.num_output > 1:
            self._per_token.labels(model).observe((times.end_s - times.first_s) / (usage.num_output - 1))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    """Collects the engines' own counters on demand."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterator[Metric]:
        engines = {model.name: model.engine for model in self._catalog if model.engine is not None}
        for name, (help, key) in GAUGES.items():
            gauge = GaugeMetricFamily(name, help, labels=["model_name"])
            for model, engine in engines.items():
                stats = engine.stats
                used = stats.get("num_used_blocks", 0) / max(1, stats.get("num_blocks", 1))
                gauge.add_metric([model], stats.get(key, 0) if key else used)
            yield gauge
        for name, (help, key) in COUNTERS.items():
            counter = CounterMetricFamily(name, help, labels=["model_name"])
            for model, engine in engines.items():
                counter.add_metric([model], engine.total(key))
            yield counter
        accepted = CounterMetricFamily(
            PER_POSITION, "Accepted draft tokens, by place in the draft.", labels=["model_name", "position"]
        )
        for model, engine in engines.items():
            for place in range(NUM_POSITIONS):
                accepted.add_metric([model, str(place)], engine.total(f"num_accepted_at_{place}"))
        yield accepted
        for name, (help, prefix) in PER_DRAFTER.items():
            counter = CounterMetricFamily(name, help, labels=["model_name", "drafter"])
            for model, engine in engines.items():
                for drafter, count in sum_totals(engine, prefix).items():
                    counter.add_metric([model, drafter], count)
            yield counter
        waiting = GaugeMetricFamily("penstock:num_requests_waiting", "Waiting requests.", labels=["model_name"])
        restarts = CounterMetricFamily("penstock:engine_restarts", "Engine restarts.", labels=["model_name"])
        for model, engine in engines.items():
            waiting.add_metric([model], len(engine.admission) + engine.stats.get("num_waiting", 0))
            restarts.add_metric([model], engine.num_restarts)
        yield waiting
        yield restarts
