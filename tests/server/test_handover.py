"""Servers with roles behind a router: one computes prompts, another answers, and the blocks go between them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.errors import InvalidConfig
from penstock.server.config import ServerConfig
from penstock.server.engines.process import Launch
from penstock.server.handover.roles import make_transfer
from tests.server.routing import route, serve
from tests.server.running import RunningServer
from tests.server.streams import Said, chats, run_all

pytestmark = pytest.mark.timeout(240)
TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why. "


def start(model: Path, folder: Path, role: str, *more: str) -> RunningServer:
    """A server of one role, not yet started."""
    return serve(model, folder, "--role", role, "--kv-offloading-size", "0.2", *more)


class Fleet:
    """A prefill server and a decode server behind a router."""

    def __init__(self, router: RunningServer, prefill: RunningServer, decode: RunningServer) -> None:
        self.router, self.prefill, self.decode, self.url = router, prefill, decode, router.url

    def count(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics").text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    def explain(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.decode.url}/admin/requests/{id}").json()
        return found


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that does both."""
    with serve(tiny_model, tmp_path_factory.mktemp("alone")) as running:
        yield running


def wait_upstreams(router: RunningServer, count: int) -> None:
    end = time.monotonic() + 60
    while httpx.get(f"{router.url}/health/ready").json()["upstreams_ready"] != count:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module", params=["tcp", "files"])
def fleet(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    shared = ("--kv-offloading-path", str(folder / "kv"))
    by_tcp = request.param == "tcp"
    prefill = start(tiny_model, folder, "prefill", *(("--kv-transfer-port", "0") if by_tcp else shared))
    decode = start(tiny_model, folder, "decode", *(() if by_tcp else shared))
    with prefill, decode, route([prefill, decode], folder) as router:
        wait_upstreams(router, 2)
        yield Fleet(router, prefill, decode)


def complete(url: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json={"temperature": 0, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_long_prompt_is_computed_by_one_server_and_answered_by_the_other(alone: RunningServer, fleet: Fleet) -> None:
    prompt = "One. " + TEXT * 20
    for options in ({"max_tokens": 12}, {"max_tokens": 6, "n": 3, "temperature": 0.9, "seed": 5}, {"max_tokens": 1}):
        before = fleet.count("penstock_router:prompts_handed_over_total")
        handed, whole = complete(fleet.url, prompt=prompt, **options), complete(alone.url, prompt=prompt, **options)
        assert handed["choices"] == whole["choices"]
        assert fleet.count("penstock_router:prompts_handed_over_total") == before + 1
        found = fleet.explain(handed["id"])
        assert found["handover"]["prompt_tokens"] == handed["usage"]["prompt_tokens"]
        assert found["handover"]["server"] == fleet.prefill.url and found["handover"]["prefill_s"] > 0
        assert handed["usage"]["prompt_tokens_details"]["cached_tokens"] >= handed["usage"]["prompt_tokens"] - 16
        prompt = f"{options} " + prompt
    assert "restored from the store" in str(found["stages"])
    if found["handover"]["fetched_blocks"]:
        assert "blocks of its prompt were fetched" in str(found["stages"])


def test_servers_tell_their_roles(fleet: Fleet, alone: RunningServer) -> None:
    for server, role in ((fleet.prefill, "prefill"), (fleet.decode, "decode")):
        assert httpx.get(f"{server.url}/health/ready").json()["role"] == role
        assert httpx.get(f"{server.url}/info").json()["role"] == role
    assert "role" not in httpx.get(f"{alone.url}/health/ready").json()
    listed = httpx.get(f"{fleet.url}/admin/upstreams").json()["upstreams"]
    assert [one["role"] for one in listed] == ["prefill", "decode"]


def test_short_prompts_and_known_ones_go_straight_to_the_decode_server(fleet: Fleet) -> None:
    text, counts = "A story that goes on. " * 20, []
    for _ in range(3):
        before = fleet.count("penstock_router:prompts_handed_over_total")
        answer = complete(fleet.url, prompt=text, max_tokens=4)
        counts.append(fleet.count("penstock_router:prompts_handed_over_total") - before)
        text += answer["choices"][0]["text"] + " And then? "
    before = fleet.count("penstock_router:prompts_handed_over_total")
    assert "handover" not in fleet.explain(complete(fleet.url, prompt="Once upon a time", max_tokens=2)["id"])
    counts.append(fleet.count("penstock_router:prompts_handed_over_total") - before)
    assert counts == [1, 0, 0, 0]
    assert fleet.count("penstock_router:handovers_failed_total") == 0


def test_every_dialect_is_handed_over(alone: RunningServer, fleet: Fleet) -> None:
    for number, (path, body) in enumerate(list_dialects()):
        before = fleet.count("penstock_router:prompts_handed_over_total")
        told = {name: _fill(value, f"Number {number}. " + TEXT * 8) for name, value in body.items()}
        found, whole = (httpx.post(f"{url}{path}", json=told, timeout=60) for url in (fleet.url, alone.url))
        assert found.status_code == whole.status_code == 200, (path, found.text)
        assert fleet.count("penstock_router:prompts_handed_over_total") == before + 1, path
        assert _find_text(found.text) == _find_text(whole.text), path


def list_dialects() -> list[tuple[str, dict[str, Any]]]:
    messages = [{"role": "user", "content": "TEXT"}]
    return [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0, "stream": True}),
        ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 5, "temperature": 0}),
        ("/v1/responses", {"input": "TEXT", "max_output_tokens": 5, "temperature": 0}),
        ("/v1/responses", {"input": "TEXT", "max_output_tokens": 5, "temperature": 0, "stream": True}),
        ("/api/generate", {"prompt": "TEXT", "stream": False, "options": {"num_predict": 5, "temperature": 0}}),
        ("/generate", {"inputs": "TEXT", "parameters": {"max_new_tokens": 5}}),
        ("/completion", {"prompt": "TEXT", "n_predict": 5, "temperature": 0}),
    ]


def _fill(value: Any, text: str) -> Any:
    if isinstance(value, list):
        return [{**one, "content": text} for one in value]
    return text if value == "TEXT" else value


def _find_text(answer: str) -> list[str]:
    """What an answer says, whatever its form: the values of its text fields."""
    return re.findall(r'"(?:content|text|response|generated_text|delta)":\s?"((?:[^"\\]|\\.)*)"', answer)


@pytest.mark.parametrize("fleet", ["tcp"], indirect=True)
def test_what_cannot_be_handed_over_is_computed_by_the_decode_server(alone: RunningServer, fleet: Fleet) -> None:
    prompt = "Scores. " + TEXT * 8
    for body in ({"prompt_logprobs": 1, "max_tokens": 2}, {"use_beam_search": True, "n": 2, "max_tokens": 3}):
        handed, whole = (complete(url, prompt=prompt, **body) for url in (fleet.url, alone.url))
        assert handed["choices"] == whole["choices"]
        assert "handover" not in fleet.explain(handed["id"])
    refused = httpx.post(f"{fleet.url}/v1/completions", json={"prompt": prompt, "max_tokens": -3})
    assert refused.status_code == 400 and "max_tokens" in refused.text
    long = httpx.post(f"{fleet.url}/v1/completions", json={"prompt": prompt * 40, "max_tokens": 3})
    assert long.status_code == 400 and "4096" in long.text


def results(said: list[Said]) -> list[tuple[str, str | None, list[int]]]:
    assert not [one.error for one in said if one.error]
    return [(one.text, one.finish_reason, one.token_ids) for one in said]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_streams_outlive_either_server(
    alone: RunningServer, tiny_model: Path, tmp_path: Path, victim: str, stops: bool
) -> None:
    texts = [f"{number}. " + TEXT * 12 for number in range(6)]
    asked = [{**one, "messages": [{"role": "user", "content": text}]} for text, one in zip(texts, chats(6, 200))]
    expected = asyncio.run(run_all(alone.url, asked))
    number = signal.SIGSTOP if stops else signal.SIGKILL
    prefill = start(tiny_model, tmp_path, "prefill", "--kv-transfer-port", "0")
    decode = start(tiny_model, tmp_path, "decode")
    with prefill, decode, route([prefill, decode], tmp_path, "--hang-timeout", "1") as router:
        wait_upstreams(router, 2)
        process = (prefill if victim == "prefill" else decode).process

        async def hit(counts: list[int]) -> None:
            while not any(count > 1 for count in counts):
                await asyncio.sleep(0.005)
            os.kill(process.pid, number)

        assert results(asyncio.run(run_all(router.url, asked, hit))) == results(expected)
        left = complete(router.url, prompt="After that. " + TEXT * 8, max_tokens=3)
        assert left["choices"] == complete(alone.url, prompt="After that. " + TEXT * 8, max_tokens=3)["choices"]
        os.kill(process.pid, signal.SIGCONT)
        process.kill()


class FailingPrefill(socketserver.ThreadingTCPServer):
    """A server that says that it computes prompts, and answers with a status and `answer`; None: it breaks off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _FailingHandler)
        self.answer: bytes | None = None
        self.num_asked = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _FailingHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, FailingPrefill)
        line, length = self.rfile.readline(), 0
        while (header := self.rfile.readline().strip().lower()) != b"":
            length = int(header.split()[1]) if header.startswith(b"content-length") else length
        self.rfile.read(length)
        if line.startswith(b"GET"):
            self._send(200, b'{"status": "ready", "role": "prefill"}')
        else:
            server.num_asked += 1
            if server.answer is not None:
                self._send(int(server.answer[:3]), server.answer[3:])

    def _send(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body))
        self.wfile.write(head + body)


GONE = b'200{"handed_over": {"num_tokens": 90, "seconds": 0.5, "transfer_port": 9}}'


@pytest.mark.parametrize("fleet", ["tcp"], indirect=True)
def test_a_prefill_server_that_fails_costs_time_only(alone: RunningServer, fleet: Fleet, tmp_path: Path) -> None:
    with FailingPrefill() as prefill, route([fleet.decode, prefill.url], tmp_path) as router:
        for number, answer in enumerate((None, b"429{}", b"500{}", b"200{}", b"200rubbish", b"400{}", GONE), 1):
            wait_upstreams(router, 2)
            prefill.answer = answer
            body = {"prompt": f"{answer!r} " + TEXT * 8, "max_tokens": 5}
            assert complete(router.url, **body)["choices"] == complete(alone.url, **body)["choices"]
            assert prefill.num_asked == number, answer
        prefill.shutdown()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"role": ("decode",)}, "or, for servers of both roles behind penstock route, set router_key_file"),
        ({"role": ("decode",), "router_key_file": "k", "kv_transfer_port": 0}, "set role=prefill, or leave it out"),
        ({"kv_transfer_port": 7000}, "kv_transfer_port=7000 is for a server that computes prompts for others"),
    ],
)
def test_a_lone_role_needs_a_router(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        ServerConfig(**options)


@pytest.mark.parametrize(
    ("role", "port", "options", "said"),
    [
        ("prefill", None, {"kv_offloading_size": 1}, "set kv_transfer_port so that decode servers can fetch them"),
        ("decode", None, {}, "role=decode hands prompts over through a store: set kv_offloading_size"),
        ("prefill", 0, {"kv_offloading_size": 1, "tensor_parallel_size": 2}, "with 2 ranks hands prompts over through"),
    ],
)
def test_blocks_need_a_way(tmp_path: Path, role: str, port: int | None, options: dict[str, Any], said: str) -> None:
    config = ServerConfig(role=(role,), router_key_file="k", kv_transfer_port=port)
    transfer = make_transfer(config, "sesame")
    assert transfer is not None and "sesame" not in transfer.secret
    with pytest.raises(InvalidConfig, match=said):
        Launch("m", options, tmp_path, 1, roles=(role,), transfer=transfer)


def test_clients_cannot_ask_as_a_router(fleet: Fleet) -> None:
    body = {"prompt": TEXT * 8, "max_tokens": 2}
    forged = {"penstock-handed-over": '{"server": "x", "num_tokens": 1, "seconds": 1, "source": "127.0.0.1:1"}'}
    for headers in (forged, {"penstock-prefill": "1"}):
        plain = httpx.post(f"{fleet.decode.url}/v1/completions", json=body, headers=headers).json()
        assert plain["choices"] and "handover" not in fleet.explain(plain["id"])
        wrong = {**headers, "penstock-router-key": "guess"}
        assert httpx.post(f"{fleet.decode.url}/v1/completions", json=body, headers=wrong).status_code == 403
