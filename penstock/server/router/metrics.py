"""The router's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.server.router.admission import FleetQueue
from penstock.server.router.pool import UpstreamPool


class RouterMetrics:
    def __init__(self, pool: UpstreamPool, queue: FleetQueue) -> None:
        self._registry = CollectorRegistry()
        self._http = Counter(
            "penstock_router:http_requests",
            "HTTP requests, by route, method and status.",
            ["route", "method", "status"],
            registry=self._registry,
        )
        self._connections = Counter(
            "penstock_router:connections_refused",
            "Refused connections, by reason.",
            ["reason"],
            registry=self._registry,
        )
        self._registry.register(_PoolCollector(pool, queue))

    def count_http(self, route: str, method: str, status: int) -> None:
        self._http.labels(route, method, str(status)).inc()

    def count_refused_connection(self, reason: str) -> None:
        self._connections.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _PoolCollector:
    """Collects what is known of the servers on demand."""

    def __init__(self, pool: UpstreamPool, queue: FleetQueue) -> None:
        self._pool, self._queue = pool, queue

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("penstock_router:upstream_ready", "1 while a server is ready.", labels=["upstream"])
        running = GaugeMetricFamily(
            "penstock_router:upstream_requests_running", "Running requests.", labels=["upstream"]
        )
        deaths = CounterMetricFamily(
            "penstock_router:upstream_failures", "Answers that broke off.", labels=["upstream"]
        )
        answers = CounterMetricFamily(
            "penstock_router:upstream_responses", "Answers of servers, by status.", labels=["upstream", "status"]
        )
        for one in self._pool:
            ready.add_metric([one.name], float(one.takes_requests))
            running.add_metric([one.name], one.num_running)
            deaths.add_metric([one.name], one.num_deaths)
            for status, count in sorted(one.responses.items()):
                answers.add_metric([one.name, str(status)], count)
        waiting = GaugeMetricFamily("penstock_router:requests_waiting", "Requests that wait for a server's row.")
        waiting.add_metric([], len(self._queue))
        yield from (ready, running, waiting, deaths, answers)
        totals = (
            ("penstock_router:requests_refused", "Requests that found the queue full.", self._queue.num_refused),
            ("penstock_router:streams_continued", "Streams that went on on another server.", self._pool.num_continued),
            ("penstock_router:prompt_parts", "Parts of prompts that were routed.", self._pool.num_prompt_parts),
            (
                "penstock_router:prompts_handed_over",
                "Prompts that a prefill server computed for a decode server.",
                self._pool.handovers.num_done,
            ),
            (
                "penstock_router:handover_seconds",
                "Seconds that requests waited for that.",
                self._pool.handovers.seconds,
            ),
            (
                "penstock_router:handovers_failed",
                "Prompts that no prefill server computed: their decode server did.",
                self._pool.handovers.num_failed,
            ),
            (
                "penstock_router:prompt_parts_known",
                "Those that their server was sent before.",
                self._pool.num_known_parts,
            ),
        )
        for name, help, value in totals:
            counter = CounterMetricFamily(name, help)
            counter.add_metric([], value)
            yield counter
