"""Mutated bodies beside live streams: none is a failure of the server, and the streams do not notice."""

from __future__ import annotations

import asyncio
import time
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
    with RunningServer(
        str(tiny_model), "--load-format", "dummy", "--threads", "1", "--max-model-len", "1024", "--max-body-mb", "4"
    ) as running:
        yield running


def stories() -> list[dict[str, Any]]:
    return [
        {
            "messages": [{"role": "user", "content": f"the dog ran after ball {index}"}],
            "max_tokens": 900,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index, "top_p": 0.95}),
        }
        for index in range(NUM_STREAMS)
    ]


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
    answer = httpx.post(tiny_server.url + path, json=body, timeout=240)
    if path in POOLING:
        assert answer.status_code == 400 and "embedding model" in answer.text
    else:
        assert answer.status_code == 200, answer.text
        check_answer(path, answer)


def ids(server: RunningServer, text: str) -> list[int]:
    found: list[int] = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    return found


def test_constraints_that_leave_no_token_are_the_requests_fault(tiny_server: RunningServer) -> None:
    answer = httpx.post(
        f"{tiny_server.url}/v1/completions",
        json={"prompt": "a", "max_tokens": 20, "guided_regex": "[xy]+", "allowed_token_ids": ids(tiny_server, "q")},
    )
    check_answer("/v1/completions", answer)
    assert answer.status_code == 400 and "leave no token" in answer.json()["error"]["message"]


def test_an_answer_that_fails_ends_its_siblings(tiny_server: RunningServer) -> None:
    """Those that begin with b cannot go on; those that begin with a would run for 600 tokens."""
    before = tiny_server.stats()["num_aborted"]
    letters = [ids(tiny_server, letter)[0] for letter in "ab"]
    answer = httpx.post(
        f"{tiny_server.url}/v1/completions",
        timeout=240,
        json={
            "prompt": "a",
            "max_tokens": 700,
            "guided_regex": "a[ab]{600}|bc",
            "allowed_token_ids": letters,
            "n": 16,
            "temperature": 2,
            "logit_bias": {str(id): 100 for id in letters},
            "seed": 1,
        },
    )
    assert answer.status_code == 400, answer.text
    end = time.monotonic() + 15
    while tiny_server.stats()["num_aborted"] == before and time.monotonic() < end:
        time.sleep(0.2)
    assert tiny_server.stats()["num_aborted"] > before


def test_mutated_bodies(tiny_server: RunningServer) -> None:
    fuzz(tiny_server, 300, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_mutated_bodies(tiny_server: RunningServer) -> None:
    fuzz(tiny_server, 20_000, seed=2)
