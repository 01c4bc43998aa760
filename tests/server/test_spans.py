"""Timelines as OpenTelemetry spans, at a collector on the loopback interface."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.errors import InvalidConfig
from penstock.server.observe.spans import check_endpoint, open_spans
from penstock.server.observe.trace import Trace
from tests.server.running import RunningServer

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="install penstock[otel]")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Responder(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            data = self.rfile.read(int(self.headers["Content-Length"]))
            data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Responder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    server.server_close()


def test_stages_are_spans_of_the_clients_trace(tiny_model: Path, collector: tuple[str, list[Any]]) -> None:
    url, spans = collector
    flags = (str(tiny_model), "--load-format", "dummy", "--threads", "1", "--otlp-traces-endpoint", url)
    body = {"prompt": list(range(20, 60)), "max_tokens": 5, "ignore_eos": True}
    with RunningServer(*flags) as running:
        for flag in ("01", "00"):  # sampled by the client, and not
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flag}"}
            assert httpx.post(f"{running.url}/v1/completions", json=body, headers=headers).status_code == 200
        own = httpx.post(f"{running.url}/v1/completions", json=body, headers={"traceparent": "nonsense"})
        told = httpx.get(f"{running.url}/admin/requests/{own.json()['id']}").json()
        httpx.get(f"{running.url}/v1/models")
        assert running.stop() == 0  # the last spans are sent before the end
    roots = [span for span in spans if span.name == "llm_request"]
    assert len(roots) == 2
    first, second = sorted(roots, key=lambda span: span.start_time_unix_nano)
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert second.trace_id.hex() != TRACE and not second.parent_span_id
    stages = [span for span in spans if span.parent_span_id == second.span_id]
    assert [span.name for span in stages] == [stage["name"] for stage in told["stages"]]
    assert {"queue", "prefill", "decode"} <= {span.name for span in stages}
    total = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in stages)
    assert total == pytest.approx(second.end_time_unix_nano - second.start_time_unix_nano, abs=1e5)
    values = {one.key: one.value for one in second.attributes}
    assert values["gen_ai.usage.prompt_tokens"].int_value == 40
    assert values["gen_ai.usage.completion_tokens"].int_value == 5
    assert values["gen_ai.request.id"].string_value == own.json()["id"]


@pytest.mark.slow
def test_a_collector_that_is_gone_holds_nothing_up(tiny_model: Path) -> None:
    flags = (str(tiny_model), "--load-format", "dummy", "--threads", "1")
    with RunningServer(*flags, "--otlp-traces-endpoint", "http://127.0.0.1:9") as running:
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 2}, timeout=20)
        assert answer.status_code == 200 and running.stop() == 0


def test_the_end_waits_for_spans_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that takes the connection and does not answer."""
    monkeypatch.setattr("penstock.server.observe.spans.CLOSE_S", 0.05)
    goes_on, ended = threading.Event(), threading.Event()

    class Stuck:
        def export(self, spans: object) -> None:
            goes_on.wait(10)
            ended.set()

        def shutdown(self) -> None:
            pass

    spans = open_spans("http://localhost:4318", Stuck())
    trace = Trace("req_1")
    trace.model = "tiny"
    trace.finish(200)
    spans.write(trace)
    asyncio.run(spans.close())  # joins the threads of its pool
    assert not ended.is_set()
    goes_on.set()


def test_spans_in_memory() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    spans = open_spans("http://localhost:4318", memory)
    trace = Trace("req_1", "tenant", begun_s=100.0)
    spans.write(trace)  # neither ended nor of a model
    trace.model, trace.status = "tiny", 500
    trace.finish(500)
    spans.write(trace)
    spans._shutdown()
    stage, root = memory.get_finished_spans()
    assert root.attributes is not None and root.attributes["penstock.tenant"] == "tenant"
    assert root.status.status_code.name == "ERROR" and stage.name == "receive"


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_endpoint("http://host:4318/") == "http://host:4318/v1/traces"
    assert check_endpoint("https://host/v1/own") == "https://host/v1/own"
    for wrong in ("", "host:4318", "grpc://host", "http://", "http://host:99999"):
        with pytest.raises(InvalidConfig, match="otlp_traces_endpoint"):
            check_endpoint(wrong)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'penstock\[otel\]'"):
        open_spans("http://host")
