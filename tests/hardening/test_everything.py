"""All attacks beside sixteen streams: the loop stays free, memory bounded, every stream as it was."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from bench.stalls.attacks import ATTACKS
from tests.hardening.counted import CountedServer
from tests.server.streams import chats, run_all

MAX_GROWTH = 3 * (32 << 20)  # three times the largest body
ANSWERED = {0, 200, 400, 404, 413, 422, 429, 431}
LONG = ("endless grammars", "many prompts")


async def attack(server: CountedServer, name: str, statuses: list[int]) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        statuses += await ATTACKS[name](client)


def check(server: CountedServer, name: str) -> None:
    bodies = chats(16, max_tokens=60)
    undisturbed = asyncio.run(run_all(server.url, bodies))
    pid, before = server.engine_pid(), server.rss_bytes()
    server.forget_peak()
    server.forget()
    statuses: list[int] = []
    said = asyncio.run(run_all(server.url, bodies, lambda counts: attack(server, name, statuses)))
    assert set(statuses) <= ANSWERED, statuses
    assert [one.token_ids for one in said] == [one.token_ids for one in undisturbed]
    server.check_callbacks()
    assert server.engine_pid() == pid
    assert server.rss_bytes(peak=True) - before < MAX_GROWTH


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("unknown keys", "wrong types")))
        for name in sorted(set(ATTACKS) - set(LONG))
    ],
)
def test_nobody_notices_an_attack(counted: CountedServer, name: str) -> None:
    check(counted, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_nobody_notices_a_long_attack(counted: CountedServer, name: str) -> None:
    check(counted, name)


@pytest.mark.slow
def test_nobody_notices_all_attacks_at_once(counted: CountedServer) -> None:
    bodies = chats(16, max_tokens=400)
    undisturbed = asyncio.run(run_all(counted.url, bodies))
    pid = counted.engine_pid()
    counted.forget()
    statuses: list[int] = []

    async def all_at_once(counts: list[int]) -> None:
        await asyncio.gather(*(attack(counted, name, statuses) for name in ATTACKS))

    said = asyncio.run(run_all(counted.url, bodies, all_at_once))
    assert set(statuses) <= ANSWERED, statuses
    assert [one.token_ids for one in said] == [one.token_ids for one in undisturbed]
    counted.check_callbacks()
    assert counted.engine_pid() == pid
