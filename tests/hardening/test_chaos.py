"""A fault every few seconds under mixed load: every answer ends, token for token as the undisturbed one does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "good": {"type": "boolean"}},
    "required": ["name", "good"],
    "additionalProperties": False,
}
HANG_S = 2.0


def bodies() -> list[dict[str, Any]]:
    """Plain, seeded, with several answers, structured, with stop strings and log probabilities; short and long."""
    made: list[dict[str, Any]] = []
    for index in range(4):
        common = {
            "messages": [{"role": "user", "content": f"Tell me about the number {index}."}],
            "ignore_eos": True,
            "return_token_ids": True,
        }
        made += [
            {**common, "max_tokens": 400, "temperature": 0},
            {**common, "max_tokens": 200, "temperature": 0.9, "seed": index, "top_p": 0.9},
            {**common, "max_tokens": 60, "temperature": 1.0, "seed": index, "n": 3 + 7 * (index % 2)},
            {
                **common,
                "max_tokens": 120,
                "temperature": 0.8,
                "seed": index,
                "stop": ["\u0011", "zq"],
                "repetition_penalty": 1.1,
            },
            {
                **common,
                "max_tokens": 60,
                "temperature": 0,
                "seed": index,
                "ignore_eos": False,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            },
        ]
    return made


async def ask(client: httpx.AsyncClient, body: dict[str, Any], streams: bool) -> list[tuple[Any, ...]]:
    """What each choice said, however it came."""
    if not streams:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return [
            (choice["message"]["content"], choice["token_ids"], choice["finish_reason"])
            for choice in answer.json()["choices"]
        ]
    texts, tokens, ends = dict[int, str](), dict[int, list[int]](), dict[int, str]()
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = httpx.Response(200, content=line[6:]).json()
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                at = choice["index"]
                texts[at] = texts.get(at, "") + (choice["delta"].get("content") or "")
                tokens.setdefault(at, []).extend(choice.get("token_ids") or [])
                ends[at] = choice["finish_reason"] or ends.get(at, "")
    return [(texts[at], tokens[at], ends[at]) for at in sorted(texts)]


async def disturb(server: RunningServer, num_faults: int, rng: random.Random) -> None:
    """kill -9, SIGSTOP, and kills of one engine after another while they load."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def pid() -> int:
            return int((await client.get("/info")).json()["models"][0]["pid"])

        async def next_pid(victim: int) -> int:
            while (following := await pid()) == victim:
                await asyncio.sleep(0.01)
            return following

        async def ready() -> bool:
            return (await client.get("/health/ready")).status_code == 200

        for number in range(num_faults):
            while not await ready():
                await asyncio.sleep(0.05)
            await asyncio.sleep(rng.uniform(0.2, 3.0))
            victim = await pid()
            os.kill(victim, signal.SIGSTOP if number % 3 == 1 else signal.SIGKILL)
            victim = await next_pid(victim)
            for _ in range(2 if number % 3 == 2 else 0):
                await asyncio.sleep(rng.uniform(0.0, 0.4))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                victim = await next_pid(victim)


async def storm(server: RunningServer, num_faults: int, num_clients: int = 8) -> tuple[int, list[str]]:
    """How many answers came, and what was wrong with some."""
    asked, rng, wrong, count = bodies(), random.Random(num_faults), list[str](), 0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        expected = [await ask(client, body, False) for body in asked]
        faults = asyncio.ensure_future(disturb(server, num_faults, rng))

        async def go_on(first: int) -> None:
            nonlocal count
            index = first
            while not faults.done():
                try:
                    said = await ask(client, asked[index], streams=bool(rng.getrandbits(1)))
                    if said != expected[index]:
                        wrong.append(f"body {index}: {said} is not {expected[index]}")
                except (AssertionError, httpx.HTTPError) as error:
                    wrong.append(f"body {index}: {error!r}")
                count += 1
                index = (index + 3) % len(asked)

        await asyncio.gather(*(go_on(first) for first in range(num_clients)))
        await faults
    return count, wrong


def run_chaos(model: Path, num_faults: int) -> None:
    with RunningServer(
        str(model), "--load-format", "dummy", "--threads", "1", "--hang-timeout", str(HANG_S), "--max-num-seqs", "6"
    ) as server:
        count, wrong = asyncio.run(storm(server, num_faults))
        restarts = httpx.get(f"{server.url}/info").json()["models"][0]["num_restarts"]
    assert not wrong, (len(wrong), wrong[:3])
    assert restarts >= num_faults and count > num_faults


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_chaos(tiny_model: Path) -> None:
    run_chaos(tiny_model, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_chaos_of_each_kind(tiny_model: Path) -> None:
    run_chaos(tiny_model, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_chaos(tiny_model: Path) -> None:
    run_chaos(tiny_model, 100)
