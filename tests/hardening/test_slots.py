"""Turns at the tokenizer's processes: fair among tenants, and none is lost with one who leaves."""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock.errors import Busy
from penstock.sandbox.lanes import Slots


def test_a_turn_passed_to_one_who_just_left_goes_on() -> None:
    """Breaks where a cancelled waiter, not yet out of the queue, is given the turn: it is lost for good."""

    async def run() -> None:
        slots = Slots(1, 10, "jobs")
        release = asyncio.Event()

        async def hold() -> None:
            async with slots.turn():
                await release.wait()

        async def take() -> None:
            async with slots.turn():
                pass

        holder = asyncio.ensure_future(hold())
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(take()) for _ in range(3)]
        await asyncio.sleep(0)
        release.set()
        waiting[0].cancel()
        await asyncio.gather(holder, *waiting, return_exceptions=True)
        await asyncio.wait_for(take(), 5)

    asyncio.run(run())


def test_random_leavers_lose_no_turn() -> None:
    async def run(seed: int) -> None:
        rng, slots, running = random.Random(seed), Slots(2, 1000, "jobs"), 0

        async def job(tenant: str) -> None:
            nonlocal running
            async with slots.turn(tenant):
                running += 1
                assert running <= 2
                try:
                    await asyncio.sleep(rng.random() * 0.002)
                finally:
                    running -= 1

        tasks = [asyncio.ensure_future(job(rng.choice("abc"))) for _ in range(200)]
        for _ in range(60):
            await asyncio.sleep(rng.random() * 0.002)
            for task in rng.sample(tasks, 3):
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(asyncio.gather(*(job("d") for _ in range(5))), 5)
        assert running == 0

    for seed in range(10):
        asyncio.run(run(seed))


def test_tenants_take_turns_and_the_queue_is_bounded() -> None:
    async def run() -> None:
        slots, order = Slots(1, 6, "jobs"), list[str]()

        async def job(tenant: str) -> None:
            async with slots.turn(tenant):
                order.append(tenant)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(job(tenant)) for tenant in "aaaabbb"]
        refused = asyncio.ensure_future(job("c"))
        await asyncio.gather(*tasks)
        with pytest.raises(Busy):
            await refused
        assert "".join(order) == "aababab"

    asyncio.run(run())
