"""Bad requests beside good streams: a clear 4xx for the one, nothing for the others."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer
from tests.server.streams import chats, run_all

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def deep(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


BODIES: dict[str, tuple[bytes, int, str]] = {
    "no JSON": (b"hello", 400, "JSON"),
    "empty": (b"", 400, "JSON"),
    "a list": (b"[]", 400, ""),
    "deep": (deep(100_000), 400, ""),
    "invalid UTF-8": (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, ""),
    "lone surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, ""),
    "no messages": (b"{}", 400, "messages"),
    "empty messages": (b'{"messages": []}', 400, "messages"),
    "misspelt role": (b'{"messages": [{"role": "asistant", "content": "hi"}]}', 400, "messages.0.role"),
    "empty role": (b'{"messages": [{"role": "", "content": "hi"}]}', 400, "messages.0.role"),
    "unknown key": (json.dumps({"messages": HI, "tempersture": 1}).encode(), 400, "tempersture"),
    "n too large": (json.dumps({"messages": HI, "n": 129}).encode(), 400, "n"),
    "top_logprobs too large": (
        json.dumps({"messages": HI, "logprobs": True, "top_logprobs": 21}).encode(),
        400,
        "top_logprobs",
    ),
    "temperature": (json.dumps({"messages": HI, "temperature": -1}).encode(), 400, "temperature"),
    "NaN": (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 400, ""),
    "huge number": (b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1' + b"0" * 5000 + b"}", 400, ""),
    "image": (
        json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]}
        ).encode(),
        400,
        "messages",
    ),
    "too long": (
        json.dumps({"messages": [{"role": "user", "content": "a b " * 250_000}]}).encode(),
        400,
        "context_length_exceeded",
    ),
    "logit_bias": (json.dumps({"messages": HI, "logit_bias": {"x": 1}}).encode(), 400, "logit_bias"),
    "token out of range": (json.dumps({"messages": HI, "logit_bias": {"999999": 1}}).encode(), 400, "999999"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bad_bodies(server: RunningServer, name: str) -> None:
    body, status, word = BODIES[name]
    answer = httpx.post(server.url + CHAT, content=body, timeout=240)
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert word in json.dumps(error)


def test_nul_bytes_are_text(server: RunningServer) -> None:
    answer = httpx.post(server.url + CHAT, json={"messages": [{"role": "user", "content": "a\0b"}], "max_tokens": 2})
    assert answer.status_code == 200


@pytest.mark.slow
def test_streams_do_not_notice(server: RunningServer) -> None:
    bodies = chats(6, max_tokens=100)
    undisturbed = asyncio.run(run_all(server.url, bodies))

    async def disturb(counts: list[int]) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
            for body, status, _ in BODIES.values():
                assert (await client.post(CHAT, content=body)).status_code == status
            big = await client.post(CHAT, content=b"x" * (200 << 20))
            assert big.status_code == 413
            many = await client.post(CHAT, json={"messages": HI}, headers={f"x-{i}": "y" for i in range(10_000)})
            assert many.status_code in (400, 431)

    said = asyncio.run(run_all(server.url, bodies, disturb))
    assert [one.token_ids for one in said] == [one.token_ids for one in undisturbed]


def test_an_endless_body_is_cut(server: RunningServer) -> None:
    def chunks() -> Any:
        for _ in range(200):
            yield b"x" * (1 << 20)

    try:
        answer = httpx.post(server.url + CHAT, content=chunks(), timeout=240)
        assert answer.status_code == 413
    except (httpx.WriteError, httpx.RemoteProtocolError):
        pass  # it was answered and closed while we were still sending
    assert httpx.get(f"{server.url}/health/ready").status_code == 200


def test_raw_nonsense(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for sent in (
        b"\0" * 100,
        b"GET /\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as line:
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
            line.recv(1000)
    assert httpx.get(f"{server.url}/health/ready").status_code == 200


def test_unknown_routes_and_methods(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["code"] == "not_found"
    assert httpx.get(server.url + CHAT).json()["error"]["code"] == "method_not_allowed"


def test_a_body_of_very_many_parts_is_refused_before_it_is_read(server: RunningServer) -> None:
    body = b'{"messages": [' + b",".join([b'{"role": "user", "content": "a"}'] * 60_000) + b"]}"
    answer = httpx.post(server.url + CHAT, content=body, timeout=240)
    assert answer.status_code == 400 and "send less" in answer.json()["error"]["message"]
