"""Attacks: each is a coroutine that sends hostile requests and returns the HTTP statuses it got."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx

Attack = Callable[[httpx.AsyncClient], Awaitable[list[int]]]
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
MIB = 1 << 20


async def post(client: httpx.AsyncClient, path: str, content: bytes) -> int:
    try:
        answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    except httpx.TransportError:
        return 0  # the server closed the connection
    return answer.status_code


async def post_all(client: httpx.AsyncClient, bodies: Iterable[tuple[str, bytes]]) -> list[int]:
    return list(await asyncio.gather(*(post(client, path, content) for path, content in bodies)))


def wrong(name: str, element: str, count: int = 2_000_000) -> bytes:
    """A list of many elements of a wrong type under `name`."""
    return b'{"%s": [%s]}' % (name.encode(), b",".join([element.encode()] * count))


async def wrong_types(client: httpx.AsyncClient) -> list[int]:
    bodies = [
        (CHAT, wrong("messages", "0")),
        ("/v1/completions", wrong("prompt", "null")),
        ("/v1/embeddings", wrong("input", "{}", 1_000_000)),
        ("/v1/responses", wrong("input", "1")),
        ("/v1/messages", wrong("messages", '""')),
        ("/api/chat", wrong("messages", "[]", 1_000_000)),
        ("/detokenize", wrong("tokens", '"a"')),
        ("/rerank", wrong("documents", "1")),
    ]
    return await post_all(client, bodies)


async def unknown_keys(client: httpx.AsyncClient) -> list[int]:
    keys = b",".join(b'"k%d":0' % number for number in range(500_000))
    paths = (CHAT, "/v1/completions", "/generate", "/api/chat")
    return await post_all(client, [(path, b"{%s}" % keys) for path in paths])


async def long_strings(client: httpx.AsyncClient) -> list[int]:
    body = {"messages": HI, "max_tokens": 1}
    bodies: list[dict[str, Any]] = [
        {**body, "stop": ["x" * MIB] * 16},
        {**body, "bad_words": ["word"] * 200_000},
        {**body, "model": "m" * (20 * MIB)},
        {**body, "user": "u" * (20 * MIB)},
        {**body, "logit_bias": {str(number): 1 for number in range(300_000)}},
    ]
    return await post_all(client, [(CHAT, json.dumps(one).encode()) for one in bodies])


async def long_prompts(client: httpx.AsyncClient) -> list[int]:
    texts = ["1234567890" * 400_000, "a" * 4_000_000, " " * 4_000_000, "7" * (26 * MIB)]
    bodies = [
        (path, json.dumps(body).encode())
        for text in texts
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
            ("/v1/completions", {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 10}),
            ("/tokenize", {"prompt": text}),
        )
    ]
    return await post_all(client, bodies)


async def endless_grammars(client: httpx.AsyncClient) -> list[int]:
    schemas: list[dict[str, Any]] = [
        {"allOf": [{"type": "string", "pattern": f"a.*{i}x{n}.*b"} for i in range(500)]} for n in range(6)
    ]
    schemas += [{"type": "array", "items": {"type": "string"}, "minItems": 1_000_000 + n} for n in range(3)]
    schemas += [
        {
            "$ref": "#/$defs/a",
            "title": str(n),
            "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
        }
        for n in range(3)
    ]
    bodies = [{"messages": HI, "max_tokens": 8, "structured_outputs": {"json": schema}} for schema in schemas]
    return await post_all(client, [(CHAT, json.dumps(body).encode()) for body in bodies])


async def many_prompts(client: httpx.AsyncClient) -> list[int]:
    bodies = [
        {"prompt": [f"number {n}" for n in range(512)], "max_tokens": 1},
        {"prompt": [f"number {n}" for n in range(20)], "max_tokens": 2, "n": 16},
    ]
    return await post_all(client, [("/v1/completions", json.dumps(body).encode()) for body in bodies])


async def long_headers(client: httpx.AsyncClient) -> list[int]:
    url = httpx.URL(client.base_url)
    statuses = []
    for head in (b"X-A: " + b"a" * (64 * MIB), b"\r\n".join(b"X-%d: a" % number for number in range(500_000))):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: " + url.host.encode() + b"\r\n" + head)
            await asyncio.wait_for(writer.drain(), 20)
            answer = await asyncio.wait_for(reader.readline(), 20)
            statuses.append(int(answer.split()[1]) if answer else 0)
        except (OSError, asyncio.TimeoutError):
            statuses.append(0)
        finally:
            writer.close()
    return statuses


async def silent_connections(client: httpx.AsyncClient) -> list[int]:
    url = httpx.URL(client.base_url)
    opened = []
    for _ in range(300):
        try:
            _, writer = await asyncio.open_connection(url.host, url.port)
        except OSError:
            break
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHo")
        opened.append(writer)
    await asyncio.sleep(1)
    for writer in opened:
        writer.close()
    return []


ATTACKS: dict[str, Attack] = {
    "wrong types": wrong_types,
    "unknown keys": unknown_keys,
    "long strings": long_strings,
    "long prompts": long_prompts,
    "endless grammars": endless_grammars,
    "many prompts": many_prompts,
    "long headers": long_headers,
    "silent connections": silent_connections,
}
