"""Mutated bodies beside live streams: none is a failure of the server, and the streams do not notice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.mutations import VALID, mutated
from tests.server.running import RunningServer
from tests.server.shapes import check_answer
from tests.server.streams import run_all

NUM_STREAMS = 4
AT_ONCE = 4
POOLING = ("/v1/embeddings", "/rerank")


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path) -> Iterator[RunningServer]:
    with RunningServer(str(tiny_model), "--load-format", "dummy", "--threads", "1", "--max-model-len", "1024",
                       "--max-body-mb", "4") as running:
        yield running


def stories() -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"the dog ran after ball {index}"}], "max_tokens": 900,
             "ignore_eos": True, "return_token_ids": True,
             **({"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index, "top_p": 0.95})}
            for index in range(NUM_STREAMS)]


async def send_all(url: str, bodies: Iterator[tuple[str, bytes]], statuses: Counter[int]) -> None:
    async def some(client: httpx.AsyncClient) -> None:
        for path, body in bodies:
            try:
                answer = await client.post(path, content=body)
                check_answer(path, answer)
            except Exception as error:
                raise AssertionError(f"{path} with {body[:2000]!r}: {error!r}") from error
            statuses[answer.status_code] += 1

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(some(client) for _ in range(AT_ONCE)))


def fuzz(server: RunningServer, count: int, seed: int) -> None:
    """Streams run again and again, for as long as there are bodies."""
    undisturbed = asyncio.run(run_all(server.url, stories()))
    assert all(len(one.token_ids) == 900 for one in undisturbed)
    bodies, statuses = mutated(count, seed), Counter[int]()

    async def both() -> int:
        sending = asyncio.ensure_future(send_all(server.url, bodies, statuses))
        rounds = 0
        while not sending.done():
            said = await run_all(server.url, stories())
            assert [one.token_ids for one in said] == [one.token_ids for one in undisturbed]
            rounds += 1
        await sending
        return rounds

    assert asyncio.run(both()) >= 1
    assert sum(statuses.values()) == count
    assert statuses[200] > count // 20 and statuses[400] > count // 3, statuses
    assert httpx.get(f"{server.url}/info").json()["models"][0]["num_restarts"] == 0
    assert not [line for line in server.log if "Traceback" in line], "\n".join(server.log[-50:])


@pytest.mark.parametrize("path, body", VALID, ids=[f"{index}{path}" for index, (path, _) in enumerate(VALID)])
def test_what_is_mutated_was_right(tiny_server: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(tiny_server.url + path, json=body, timeout=60)
    if path in POOLING:
        assert answer.status_code == 400 and "embedding model" in answer.text
    else:
        assert answer.status_code == 200, answer.text
        check_answer(path, answer)


def test_mutated_bodies(tiny_server: RunningServer) -> None:
    fuzz(tiny_server, 300, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_mutated_bodies(tiny_server: RunningServer) -> None:
    fuzz(tiny_server, 20_000, seed=2)
