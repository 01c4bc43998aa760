"""Export timelines as OpenTelemetry spans over OTLP, one per request and one per stage of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import InvalidConfig, quote
from penstock.host.version import VERSION
from penstock.server.observe.trace import Trace, TraceStage, explain

PATH = "/v1/traces"  # of OTLP over HTTP
CLOSE_S = 5.0
_log = logging.getLogger("penstock.server")


def check_endpoint(url: str) -> str:
    """Return the URL with OTLP's usual path if it has none."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise InvalidConfig(
            f"otlp_traces_endpoint={quote(url)} is not valid: give the URL of an OTLP collector over HTTP, such as "
            "http://localhost:4318/v1/traces"
        )
    return url if parts.path not in ("", "/") else url.rstrip("/") + PATH


def open_spans(url: str, exporter: Any = None) -> SpanWriter:
    """Begin to export to a collector, or by `exporter`."""
    endpoint = check_endpoint(url)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidConfig(
            f"otlp_traces_endpoint={quote(url)} needs OpenTelemetry ({error.name} is missing): run "
            "pip install 'penstock[otel]', or leave it out"
        ) from None
    resource = Resource.create({"service.name": "penstock", "service.version": VERSION})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
    return SpanWriter(provider.get_tracer("penstock", VERSION), provider.shutdown)


class SpanWriter:
    """Makes the spans of requests that have ended; they are sent by a thread in the background."""

    def __init__(self, tracer: Any, shutdown: Callable[[], None]) -> None:
        self._tracer, self._shutdown = tracer, shutdown

    def write(self, trace: Trace) -> None:
        """Write a timeline. A client's traceparent makes it part of the client's trace, sampled or not as that says."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if not trace.model or trace.end_s is None:
            return
        parent = TraceContextTextMapPropagator().extract({"traceparent": trace.parent}) if trace.parent else None
        root = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_describe(trace),
            start_time=_nanoseconds(trace, trace.begun_s),
        )
        if root.is_recording():
            inside = set_span_in_context(root)
            for stage in trace.stages:
                self._write_stage(trace, stage, inside)
            if (trace.status or 0) >= 500:
                root.set_status(Status(StatusCode.ERROR))
        root.end(_nanoseconds(trace, trace.end_s))

    def _write_stage(self, trace: Trace, stage: TraceStage, inside: Any) -> None:
        why = explain(stage, trace.tenant)
        span = self._tracer.start_span(
            stage.name,
            context=inside,
            attributes={"penstock.why": why} if why else {},
            start_time=_nanoseconds(trace, stage.begin_s),
        )
        span.end(_nanoseconds(trace, stage.end_s))

    async def close(self) -> None:
        """Send what waits, for some seconds."""
        thread = threading.Thread(target=self._shutdown, name="spans-close", daemon=True)  # no end waits for a daemon
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_S)
        if thread.is_alive():
            _log.warning("the last traces could not be sent within %g s", CLOSE_S)


def _nanoseconds(trace: Trace, at_s: float) -> int:
    return int(1e9 * (trace.begun_unix_s + at_s - trace.begun_s))


def _describe(trace: Trace) -> dict[str, Any]:
    """List attributes by vLLM's names where it has one. Neither prompt nor answer is among them."""
    found: dict[str, Any] = {
        "gen_ai.request.id": trace.answer_id or trace.id,
        "gen_ai.response.model": trace.model,
        "gen_ai.usage.prompt_tokens": trace.num_prompt,
        "gen_ai.usage.completion_tokens": trace.num_output,
        "gen_ai.latency.e2e": trace.e2e_s,
        "http.route": trace.route,
        "http.response.status_code": trace.status or 0,
        "penstock.request_id": trace.id,
        "penstock.tenant": trace.tenant,
        "penstock.cached_tokens": trace.num_cached,
        "penstock.preemptions": trace.num_preemptions,
        "penstock.engine_restarts": trace.num_restarts,
    }
    if trace.first_s is not None:
        found["gen_ai.latency.time_to_first_token"] = trace.first_s - trace.begun_s
    if trace.run_s is not None:
        found["gen_ai.latency.time_in_queue"] = trace.run_s - (trace.queued_s or trace.begun_s)
    if trace.finish_reasons:
        found["gen_ai.response.finish_reasons"] = list(dict.fromkeys(trace.finish_reasons))
    if trace.energy_j is not None:
        found["penstock.energy_mj"] = 1e3 * trace.energy_j
    return found
