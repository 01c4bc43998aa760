"""Many streams at once, and what each of them said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Said:
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_chunks: int = 0


async def listen(
    client: httpx.AsyncClient, body: dict[str, Any], on_chunk: Callable[[Said], None] | None = None
) -> Said:
    said = Said()
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        said.status = response.status_code
        if response.status_code != 200:
            said.error = json.loads(await response.aread())["error"]
            return said
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                said.error = chunk["error"]
                continue
            for choice in chunk["choices"]:
                said.text += choice["delta"].get("content") or ""
                said.token_ids += choice.get("token_ids") or []
                said.finish_reason = choice["finish_reason"] or said.finish_reason
            said.num_chunks += 1
            if on_chunk is not None:
                on_chunk(said)
    return said


def chats(count: int, max_tokens: int = 48) -> list[dict[str, Any]]:
    """Greedy and seeded ones by turns; every token is told."""
    return [
        {
            "messages": [{"role": "user", "content": f"Tell me a story about the number {index} and a dog."}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index, "top_p": 0.95}),
        }
        for index in range(count)
    ]


async def run_all(
    url: str, bodies: list[dict[str, Any]], beside: Callable[[list[int]], Any] | None = None
) -> list[Said]:
    """All bodies at once. `beside` is a coroutine function that gets the counts of chunks, live."""
    counts = [0] * len(bodies)

    def counter(index: int) -> Callable[[Said], None]:
        def count(said: Said) -> None:
            counts[index] = said.num_chunks

        return count

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        disturbing = asyncio.ensure_future(beside(counts)) if beside else None
        said = await asyncio.gather(*(listen(client, body, counter(i)) for i, body in enumerate(bodies)))
        if disturbing:
            await disturbing
    return list(said)
