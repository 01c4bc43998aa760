"""Requests that one server alone can answer: they go on there when a connection breaks, and say so when it is gone."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.server.routing import route, serve


@contextlib.contextmanager
def cut_answers(url: str) -> Iterator[tuple[str, list[int]]]:
    """Yield an address before a server, and a list: each number in it cuts an answer to a POST after so many bytes."""
    cuts: list[int] = []
    target = ("127.0.0.1", int(url.rsplit(":", 1)[1]))

    class Proxy(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(target) as server:
                left: int | None = None
                while ready := select.select([self.request, server], [], [])[0]:
                    for side in ready:
                        if not (data := side.recv(512)):
                            return
                        if side is self.request:
                            left = cuts.pop(0) if cuts and data.startswith(b"POST") else left
                            server.sendall(data)
                            continue
                        self.request.sendall(data[:left])
                        if left is not None and (left := left - len(data)) <= 0:
                            return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}", cuts
        finally:
            proxy.shutdown()


def ask(url: str, body: dict[str, Any]) -> tuple[list[str], str]:
    """Return the pieces of an answer's text, and all of it as its last event has it."""
    said = httpx.post(f"{url}/v1/responses", json={**body, "stream": True}, timeout=30)
    assert said.status_code == 200, said.text
    events = [json.loads(line[6:]) for line in said.text.splitlines() if line.startswith("data: {")]
    last = events[-1]["response"]["output"][0]["content"][0]["text"]
    return [one["delta"] for one in events if one["type"] == "response.output_text.delta"], last


def count(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def test_an_answer_goes_on_at_the_server_that_has_what_it_refers_to(tiny_model: Path, tmp_path: Path) -> None:
    with (
        serve(tiny_model, tmp_path) as server,
        cut_answers(server.url) as (url, cuts),
        route([url], tmp_path) as router,
    ):
        first = httpx.post(f"{router.url}/v1/responses", json={"input": "remember", "max_output_tokens": 2}).json()
        body = {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 24, "temperature": 0}
        whole, text = ask(router.url, body)
        assert "".join(whole) == text and text
        for num_bytes in (1, 700, 3000, 6000):
            cuts.append(num_bytes)
            pieces, last = ask(router.url, body)
            assert not cuts and last == text and "".join(pieces) == text, num_bytes
        assert count(router.url, "penstock_router:streams_continued_total") >= 1
        cuts.append(60)
        again = httpx.post(f"{router.url}/v1/responses", json=body, timeout=30)
        assert not cuts and again.json()["output"][0]["content"][0]["text"] == text
        server.process.kill()
        gone = httpx.post(f"{router.url}/v1/responses", json=body, timeout=30)
        assert gone.status_code == 503 and gone.json()["error"]["code"] == "upstream_lost"
        assert "the one server that has what this request refers to is not there" in gone.text
