"""Tens of thousands of requests, and storms of clients that leave: memory stays flat and every block comes back."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer
from tests.server.streams import Said, listen

NUM_REQUESTS = int(os.environ.get("PENSTOCK_SOAK_REQUESTS", 50_000))
NUM_WARM = NUM_REQUESTS // 5
EVERY = NUM_REQUESTS // 50  # requests between two samples
AT_ONCE = 8
MB = 1e6
MOST_MB_PER_10_000 = 1.0

HI = [{"role": "user", "content": "the dog ran after the ball"}]


@pytest.fixture
def tiny_server(tiny_model: Path) -> Iterator[RunningServer]:
    with RunningServer(
        str(tiny_model), "--load-format", "dummy", "--threads", "1", "--max-model-len", "1024"
    ) as running:
        yield running


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(server: RunningServer) -> dict[str, float]:
    """The engine's account once nothing runs; it is told once a second."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        stats = server.stats()
        if not (stats["num_running"] or stats["num_waiting"] or stats["num_used_blocks"]):
            break
        time.sleep(0.2)
    return stats


def slope(samples: list[tuple[int, int]]) -> float:
    """Megabytes per 10,000 requests, by least squares."""
    middle = sum(count for count, _ in samples) / len(samples)
    above = sum((count - middle) * size for count, size in samples)
    return above / sum((count - middle) ** 2 for count, _ in samples) * 10_000 / MB


def leave_after(num_chunks: int) -> Callable[[Said], None]:
    def look(said: Said) -> None:
        if said.num_chunks >= num_chunks:
            raise ConnectionAbortedError

    return look


async def whole(client: httpx.AsyncClient, index: int) -> int:
    return (
        await client.post(
            "/v1/completions",
            json={"prompt": f"request {index}", "max_tokens": 4, "n": 1 + index % 2, "logprobs": index % 3},
        )
    ).status_code


async def stream(client: httpx.AsyncClient, index: int) -> int:
    said = await listen(
        client,
        {
            "messages": [{"role": "user", "content": f"{index} is a number"}],
            "max_tokens": 6,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert said.error is None and len(said.token_ids) == 6
    return said.status


async def abort(client: httpx.AsyncClient, index: int) -> int:
    with pytest.raises(ConnectionAbortedError):
        await listen(client, {"messages": HI, "max_tokens": 500, "ignore_eos": True}, leave_after(1 + index % 3))
    return 0


async def wrong(client: httpx.AsyncClient, index: int) -> int:
    body: Any = [
        {"messages": []},
        {"messages": HI, "no_such_key": index},
        {"messages": HI, "model": f"m{index}"},
        {"messages": HI, "logit_bias": {"999": 1}},
        {"messages": HI, "guided_regex": "(" * (1 + index % 9)},
    ]
    return (await client.post("/v1/chat/completions", json=body[index % len(body)])).status_code


async def structured(client: httpx.AsyncClient, index: int) -> int:
    """Every schema is another, so that none is found compiled."""
    schema = {
        "type": "object",
        "properties": {f"k{index}": {"type": "boolean"}},
        "required": [f"k{index}"],
        "additionalProperties": False,
    }
    return (
        await client.post(
            "/v1/chat/completions",
            json={
                "messages": HI,
                "max_tokens": 24,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            },
        )
    ).status_code


KINDS = ((whole, 6), (stream, 6), (abort, 2), (wrong, 4), (structured, 2))
EXPECTED = {"whole": {200}, "stream": {200}, "abort": {0}, "wrong": {400, 404}, "structured": {200}}


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_memory_stays_flat(tiny_server: RunningServer) -> None:
    pids = {"API": tiny_server.process.pid, "engine": tiny_server.engine_pid()}
    samples: dict[str, list[tuple[int, int]]] = {name: [] for name in pids}
    chance, indices = random.Random(1), iter(range(NUM_REQUESTS))
    kinds, weights = [kind for kind, _ in KINDS], [weight for _, weight in KINDS]
    answers: Counter[tuple[str, int]] = Counter()

    async def some() -> None:
        """A client of its own for every few hundred requests: connections come and go, too."""
        index = next(indices, None)
        while index is not None:
            async with httpx.AsyncClient(base_url=tiny_server.url, timeout=120) as client:
                for _ in range(300):
                    kind = chance.choices(kinds, weights)[0]
                    answers[kind.__name__, await kind(client, index)] += 1
                    if index % EVERY == 0:
                        for name, pid in pids.items():
                            samples[name].append((index, resident_bytes(pid)))
                    index = next(indices, None)
                    if index is None:
                        return

    async def run() -> None:
        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    asyncio.run(run())
    assert sum(answers.values()) == NUM_REQUESTS
    assert all(status in EXPECTED[name] for name, status in answers), answers
    stats = settled(tiny_server)
    assert stats["num_used_blocks"] == 0 and stats["num_running"] == 0
    assert tiny_server.engine_pid() == pids["engine"]
    grown = {
        name: slope([(count, size) for count, size in taken if count >= NUM_WARM]) for name, taken in samples.items()
    }
    for name, taken in samples.items():
        print(f"{name}: {grown[name]:+.2f} MB per 10,000 requests; {[round(size / MB, 1) for _, size in taken]}")
    assert max(grown.values()) <= MOST_MB_PER_10_000, f"MB per 10,000 requests: {grown}"


@pytest.mark.slow
def test_a_storm_of_clients_that_leave(tiny_server: RunningServer) -> None:
    """200 streams at once, every fifth left in its middle; the others come to their end."""

    async def one(client: httpx.AsyncClient, index: int) -> Said | None:
        body = {
            "messages": [{"role": "user", "content": f"number {index}"}],
            "max_tokens": 100,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if index % 5:
            return await listen(client, body)
        with pytest.raises(ConnectionAbortedError):
            await listen(client, body, leave_after(1 + index % 7))
        return None

    async def storm() -> list[Said | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=tiny_server.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(one(client, index) for index in range(200)))

    before = settled(tiny_server)
    said = asyncio.run(storm())
    assert [one is None for one in said] == [index % 5 == 0 for index in range(200)]
    assert all(one is None or len(one.token_ids) == 100 for one in said)
    after = settled(tiny_server)
    assert after["num_used_blocks"] == 0
    assert after["num_aborted"] - before["num_aborted"] == 40
