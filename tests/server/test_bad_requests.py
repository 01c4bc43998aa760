"""Requests that make the engine die, raise or compute nonsense: only they feel it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.faulty_worker import DEATH, NAN, RAISE
from tests.server.running import RunningServer
from tests.server.streams import Said, run_all

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def faulty(tiny_model: Path) -> Iterator[RunningServer]:
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
    command = (sys.executable, "-m", "tests.server.serve_faulty")
    with RunningServer(str(tiny_model), command=command, env=env) as running:
        yield running


def stories(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [{"role": "user", "content": f"story {index}"}],
            "max_tokens": 300,
            "ignore_eos": True,
            "return_token_ids": True,
            "seed": index,
        }
        for index in range(count)
    ]


def beside(server: RunningServer, token: int) -> tuple[list[Said], httpx.Response]:
    """Streams, and in their middle a request with that token."""
    answers: list[httpx.Response] = []

    async def ask(counts: list[int]) -> None:
        while min(counts) < 3:
            await asyncio.sleep(0.005)
        async with httpx.AsyncClient(timeout=180) as client:
            answers.append(
                await client.post(f"{server.url}/v1/completions", json={"prompt": [20, token, 21], "max_tokens": 4})
            )

    said = asyncio.run(run_all(server.url, stories(6), ask))
    return said, answers[0]


@pytest.mark.parametrize(
    "token, word",
    [
        (NAN, "NaN"),
        (RAISE, "a step that raises"),
        pytest.param(DEATH, "crashed the engine", marks=pytest.mark.slow),  # tests/hardening/test_comes_back.py has it
    ],
)
def test_only_the_culprit_fails(faulty: RunningServer, token: int, word: str) -> None:
    undisturbed = asyncio.run(run_all(faulty.url, stories(6)))
    assert all(len(one.token_ids) == 300 for one in undisturbed)
    said, answer = beside(faulty, token)
    assert answer.status_code == 500 and word in answer.json()["error"]["message"], answer.text
    assert [one.token_ids for one in said] == [one.token_ids for one in undisturbed]
    assert [one.text for one in said] == [one.text for one in undisturbed]
    again = httpx.post(f"{faulty.url}/v1/completions", json={"prompt": [20, 21], "max_tokens": 4}, timeout=60)
    assert again.status_code == 200
