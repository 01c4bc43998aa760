"""A router in front of real servers: every stream arrives whole, whatever becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.routing import KEY, route, serve
from tests.server.running import RunningServer, free_port
from tests.server.streams import Said, chats, run_all

pytestmark = pytest.mark.timeout(240)


class Fleet:
    """Two servers behind a router, and a spare one that gets nothing."""

    def __init__(self, router: RunningServer, servers: list[RunningServer], spare: RunningServer) -> None:
        self.router, self.servers, self.spare, self.url = router, servers, spare, router.url


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    one, two, three = (serve(tiny_model, folder) for _ in range(3))
    with one, two, three, route([one, two, three], folder) as router:
        _wait_upstreams(router, 3)
        _drain(router, three, True)
        yield Fleet(router, [one, two], three)


def _wait_upstreams(router: RunningServer, count: int) -> None:
    end = time.monotonic() + 60
    while httpx.get(f"{router.url}/health/ready").json()["upstreams_ready"] != count:
        assert time.monotonic() < end
        time.sleep(0.02)


def _drain(router: RunningServer, server: RunningServer, drain: bool) -> None:
    told = httpx.post(f"{router.url}/admin/upstreams", json={"url": server.url, "drain": drain})
    assert told.json()["state"] == ("drained" if drain else "ready")


def _results(said: list[Said]) -> list[tuple[str, str | None, list[int]]]:
    assert not [one.error for one in said if one.error]
    return [(one.text, one.finish_reason, one.token_ids) for one in said]


def _metric(router: RunningServer, name: str) -> float:
    page = httpx.get(f"{router.url}/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def test_every_dialect_passes_through(fleet: Fleet) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 3, "temperature": 0}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "temperature": 0}),
        ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 3, "temperature": 0}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "temperature": 0}),
        ("/api/chat", {"messages": messages, "stream": False, "options": {"num_predict": 3, "temperature": 0}}),
        ("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 3}}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}),
        ("/completion", {"prompt": "hi", "n_predict": 3, "temperature": 0}),
        ("/tokenize", {"prompt": "hi"}),
        ("/tokenize", {"content": "hi"}),
    ]
    for path, body in asks:
        answers = [httpx.post(f"{url}{path}", json=body) for url in (fleet.url, fleet.servers[0].url)]
        assert [one.status_code for one in answers] == [200, 200], answers[0].text
        assert answers[0].json().keys() == answers[1].json().keys()
    listed = httpx.get(f"{fleet.url}/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert httpx.get(f"{fleet.url}/models").json() == listed
    assert httpx.get(f"{fleet.url}/v1/health").status_code == 200
    refused = httpx.post(f"{fleet.url}/v1/completions", json={"prompt": "hi", "max_tokens": -7})
    assert refused.status_code == 400 and "max_tokens" in refused.text
    assert httpx.get(f"{fleet.url}/nowhere").status_code == 404
    assert httpx.head(f"{fleet.url}/v1/models", timeout=5).status_code == 200


def test_turns_stay_on_the_server_that_has_the_prefix(fleet: Fleet) -> None:
    before = [server.stats().get("num_cached_tokens", 0) for server in fleet.servers]
    for talk in range(4):
        text = f"{talk}" * 200
        for _ in range(3):
            body = {"prompt": text, "max_tokens": 2, "temperature": 0}
            httpx.post(f"{fleet.url}/v1/completions", json=body)
            text += "and then " * 12
    time.sleep(1.2)
    gained = [server.stats()["num_cached_tokens"] - at for server, at in zip(fleet.servers, before)]
    assert sum(gained) >= 4 * 2 * 150 and min(gained) > 0


def test_responses_files_and_batches_find_their_server(fleet: Fleet) -> None:
    with httpx.Client(base_url=fleet.url, timeout=30) as client:
        for number in range(4):
            first = client.post("/v1/responses", json={"input": f"remember {number}", "max_output_tokens": 2}).json()
            ask = {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 2}
            second = client.post("/v1/responses", json=ask)
            assert second.status_code == 200, second.text
            assert client.get(f"/v1/responses/{second.json()['id']}").status_code == 200
            assert client.delete(f"/v1/responses/{first['id']}").status_code == 200
            assert client.get(f"/v1/responses/{first['id']}").status_code == 404
            line = {
                "custom_id": "1",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "a", "max_tokens": 1},
            }
            sent = client.post("/v1/files", files={"file": ("b.jsonl", json.dumps(line))}, data={"purpose": "batch"})
            file = sent.json()["id"]
            made = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = client.post("/v1/batches", json=made).json()["id"]
            while (state := client.get(f"/v1/batches/{batch}").json())["status"] != "completed":
                time.sleep(0.02)
            assert client.get(f"/v1/files/{state['output_file_id']}/content").status_code == 200
        assert len(client.get("/v1/files").json()["data"]) >= 8


@pytest.mark.slow
def test_stopped_server_is_given_up_after_a_while(tiny_model: Path, tmp_path: Path) -> None:
    asks = chats(4, max_tokens=300)
    with serve(tiny_model, tmp_path) as one, serve(tiny_model, tmp_path) as two:
        whole = _results(asyncio.run(run_all(one.url, asks)))
        with route([one, two], tmp_path, "--hang-timeout", "0.5") as router:
            _wait_upstreams(router, 2)

            async def stop(counts: list[int]) -> None:
                while sum(count > 5 for count in counts) < 4:
                    await asyncio.sleep(0.005)
                os.kill(one.process.pid, signal.SIGSTOP)

            try:
                assert _results(asyncio.run(run_all(router.url, asks, stop))) == whole
            finally:
                os.kill(one.process.pid, signal.SIGCONT)
            _wait_upstreams(router, 2)


def test_without_servers_it_says_when_to_come_back(tmp_path: Path) -> None:
    with route_without_server(tmp_path) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=20)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
        assert "no server takes requests" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/health/ready").status_code == 503
        assert httpx.get(f"{url}/health/live").status_code == 200


@contextlib.contextmanager
def route_without_server(folder: Path, upstream: str = "") -> Iterator[str]:
    """Run a router whose only server does not exist, or cannot be used."""
    port = free_port()
    command = [sys.executable, "-m", "penstock", "route", upstream or f"http://127.0.0.1:{free_port()}"]
    command += ["--port", str(port)]
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/health/live")
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_keys_of_router_and_servers(tiny_model: Path, tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    with serve(tiny_model, tmp_path, "--api-key", "inner", "--admin-key", "root") as server:
        forged = {"penstock-router-key": "guess", "penstock-router-tenant": "root", "penstock-router-admin": "1"}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=forged).status_code == 403
        with route([server], tmp_path) as router:  # the client's key goes through
            ask = f"{router.url}/v1/completions"
            assert httpx.post(ask, json=body).status_code == 401
            assert httpx.post(ask, json=body, headers={"x-api-key": "inner"}).status_code == 200
            assert httpx.post(ask, json=body, headers={**forged, "penstock-router-key": KEY}).status_code == 403
        with route([server], tmp_path, "--api-key", "one", "--api-key", "two", "--admin-key", "boss") as router:
            ask, one = f"{router.url}/v1/completions", {"x-api-key": "one"}
            assert httpx.post(ask, json=body, headers=one).status_code == 200
            assert httpx.post(ask, json=body, headers={"x-api-key": "bad"}).status_code == 401
            made = httpx.post(f"{router.url}/v1/responses", json={"input": "a"}, headers=one).json()["id"]
            codes = [
                httpx.get(f"{router.url}/v1/responses/{made}", headers={"x-api-key": key}).status_code
                for key in ("one", "two")
            ]
            assert codes == [200, 404]  # another tenant's
            reset = f"{router.url}/admin/reset_prefix_cache"
            assert httpx.post(reset, headers={"x-api-key": "one"}).status_code == 403
            assert httpx.post(reset, headers={"x-api-key": "boss"}).status_code == 200


@contextlib.contextmanager
def _serve_garbage(answers: list[bytes], heads: list[bytes] | None = None) -> Iterator[str]:
    """A server that is ready by its word, and answers anything else with these bytes in turn."""

    class Garbage(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = self.rfile.readline()
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.rfile.read(length)
            if head.startswith(b"GET /health"):
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            elif head.startswith(b"GET /v1/models"):
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n{{{{{{{{{")
            else:
                self.wfile.write(answers[0] if len(answers) == 1 else answers.pop(0))
                if heads is not None:
                    heads.append(head)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Garbage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def test_server_that_sends_garbage_costs_no_answer(fleet: Fleet, tmp_path: Path) -> None:
    stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    marked = stream + b"penstock-relay-kind: x\r\n\r\n"
    answers = [
        b"\x00\xff\x00 nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\n" + b"x-many: 1\r\n" * 20_000,
        marked + b"15\r\n: penstock [[0,0,{{{\n\r\n0\r\n\r\n",
        marked + b"ffffffffffffffffff\r\n",
        b"",
    ]
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0, "stream": True}
    good = fleet.servers[0]
    with _serve_garbage(list(answers)) as bad:
        whole = httpx.post(f"{good.url}/v1/completions", json=body).text.count("data: ")
        with route([bad, good], tmp_path, "--policy", "round_robin") as router:
            _wait_upstreams(router, 2)
            for _ in range(2 * len(answers)):
                said = httpx.post(f"{router.url}/v1/completions", json=body, timeout=30)
                assert said.status_code == 200 and said.text.count("data: ") == whole and "[DONE]" in said.text
                time.sleep(0.25)  # until its health check lets it in again
            assert _metric(router, "penstock_router:upstream_failures_total") >= 3


def test_foreign_server_that_dies_in_its_stream_ends_it_with_an_error(tmp_path: Path) -> None:
    """Even where its end looks like the end of an answer."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    chunked = head + b"transfer-encoding: chunked\r\n\r\na\r\ndata: {}\n\n\r\n"
    with _serve_garbage([chunked, head + b"\r\ndata: {}\n\n"]) as bad, route([bad], tmp_path) as router:
        for _ in range(2):
            _wait_upstreams(router, 1)
            said = httpx.post(f"{router.url}/v1/chat/completions", json={"stream": True}, timeout=30).text
            assert said.startswith("data: {}\n\n") and '"upstream_lost"' in said and said.endswith("[DONE]\n\n")


def test_ids_stay_in_their_paths(tmp_path: Path) -> None:
    """Whatever is in them; an id that nobody would give is asked for nowhere."""
    heads: list[bytes] = []
    missing = b"HTTP/1.1 404 No\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
    with _serve_garbage([missing], heads) as server, route([server], tmp_path) as router:
        _wait_upstreams(router, 1)
        assert httpx.get(f"{router.url}/v1/files/%20%3fa%0d%0aX:%20b/content").status_code == 404
        asked = {"input": "a", "previous_response_id": "../" * 1000}
        assert httpx.post(f"{router.url}/v1/responses", json=asked).status_code == 404
    assert heads == [
        b"GET /v1/files/%20%3Fa%0D%0AX%3A%20b HTTP/1.1\r\n",
        b"GET /v1/files/%20%3fa%0d%0aX:%20b/content HTTP/1.1\r\n",
        b"POST /v1/responses HTTP/1.1\r\n",
    ]


def test_client_that_leaves_or_reads_slowly(fleet: Fleet) -> None:
    body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body) as left:
        next(left.iter_lines())
    end = time.monotonic() + 10
    while any(httpx.get(f"{one.url}/admin/running").json()["requests"] for one in fleet.servers):
        assert time.monotonic() < end, "the server goes on for nobody"
        time.sleep(0.05)
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json={**body, "max_tokens": 600}) as slow:
        text = ""
        for number, part in enumerate(slow.iter_text()):
            text += part
            if number < 10:
                time.sleep(0.05)
    assert text.endswith("[DONE]\n\n") and '"finish_reason":"length"' in text
    assert _metric(fleet.router, "penstock_router:upstream_requests_running") == 0


def test_drained_server_gets_nothing_new(fleet: Fleet) -> None:
    drained = fleet.servers[0]
    _drain(fleet.router, drained, True)
    name = f'penstock_router:upstream_responses_total{{status="200",upstream="{drained.url}"}}'
    before = _metric(fleet.router, name)
    for number in range(4):
        assert (
            httpx.post(f"{fleet.url}/v1/completions", json={"prompt": f"{number}", "max_tokens": 1}).status_code == 200
        )
    assert _metric(fleet.router, name) == before
    _drain(fleet.router, drained, False)
    assert httpx.post(f"{fleet.url}/admin/upstreams", json={"url": "http://x", "drain": True}).status_code == 404


@pytest.mark.slow
def test_upstream_by_https_is_checked(tiny_model: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "server.key", tmp_path / "server.crt"
    asked = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate)]
    asked += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(asked, check=True, capture_output=True)
    server = serve(tiny_model, tmp_path, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    server.verify = ssl.create_default_context(cafile=str(certificate))
    body = {"prompt": "a", "max_tokens": 1}
    with server:
        with route([server], tmp_path, "--upstream-ca-file", str(certificate)) as router:
            _wait_upstreams(router, 1)
            assert httpx.post(f"{router.url}/v1/completions", json=body).status_code == 200
        with route_without_server(tmp_path, server.url) as url:  # it does not trust the certificate
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 503


async def _hold(engines: dict[RunningServer, int], counts: list[int]) -> RunningServer:
    """Stop the engines once a stream has begun, until all that they wrote has come; let those go on that have no
    answer under way, and all but one of the others. That one's answers are not over when it is lost."""
    while not sum(counts):
        await asyncio.sleep(0.001)
    for engine in engines.values():
        os.kill(engine, signal.SIGSTOP)
    before = [-1]
    while counts != before:
        before = list(counts)
        await asyncio.sleep(0.1)
    running = {server: httpx.get(f"{server.url}/admin/running").json()["requests"] for server in engines}
    lost = next(one for one, requests in running.items() if any(request["num_output_tokens"] for request in requests))
    for server, engine in engines.items():
        if server is not lost:
            os.kill(engine, signal.SIGCONT)
    return lost


def test_streams_survive_a_rolling_restart_and_a_killed_server(fleet: Fleet) -> None:
    """The last test here: one server is left."""
    _drain(fleet.router, fleet.spare, False)
    asks = chats(6, max_tokens=400)
    engines = {server: server.engine_pid() for server in (*fleet.servers, fleet.spare)}
    whole = _results(asyncio.run(run_all(fleet.spare.url, asks)))

    def num_continued() -> float:
        return _metric(fleet.router, "penstock_router:streams_continued_total")

    async def roll(counts: list[int]) -> None:
        lost = await _hold(engines, counts)
        before = num_continued()
        lost.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(lost.wait_for, "stopping")
        lost.process.send_signal(signal.SIGTERM)  # at once: what runs there goes on elsewhere
        while await asyncio.to_thread(num_continued) == before:
            await asyncio.sleep(0.01)
        os.kill(engines.pop(lost), signal.SIGCONT)

    async def kill(counts: list[int]) -> None:
        (await _hold(engines, counts)).process.kill()

    assert _results(asyncio.run(run_all(fleet.url, asks, roll))) == whole
    before = num_continued()
    assert _results(asyncio.run(run_all(fleet.url, asks, kill))) == whole
    assert num_continued() > before
    _wait_upstreams(fleet.router, 1)
