"""One tenant's slow large bodies, and another's that come beside them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.server.connections import body_memory
from penstock.server.connections.body_memory import BodyMemory, BodyReservation
from tests.server.running import RunningServer

MIB = 1 << 20
SLOW_BODIES = 12


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[RunningServer]:
    with RunningServer(
        str(tiny_model), "--load-format", "dummy", "--threads", "1", "--api-key", "first", "--api-key", "second"
    ) as running:
        yield running


async def trickle(url: str, statuses: list[int]) -> None:
    """Send 3 MiB of 31, then a byte now and then; again when it is refused."""
    split = urlsplit(url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {split.netloc}\r\nAuthorization: Bearer first\r\n"
        f"Content-Type: application/json\r\nContent-Length: {31 * MIB}\r\n\r\n"
    ).encode()
    while True:
        reader, writer = await asyncio.open_connection(split.hostname, split.port)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            writer.write(head + b'{"messages": "' + b"a" * (3 * MIB))
            answer = asyncio.ensure_future(reader.readline())
            while not answer.done():
                writer.write(b"a")
                await asyncio.wait([answer], timeout=0.2)
            with contextlib.suppress(IndexError):
                statuses.append(int(answer.result().split()[1]))


def test_slow_bodies_of_one_tenant_leave_room_for_another(shared: RunningServer) -> None:
    statuses: list[int] = []

    async def ask(client: httpx.AsyncClient, size: int) -> int:
        messages = [{"role": "user", "content": "a"}]
        body = {"messages": messages, "max_tokens": 1, "metadata": {"a": "b" * size}}
        return (await client.post("/v1/chat/completions", json=body)).status_code

    async def run() -> None:
        async with httpx.AsyncClient(
            base_url=shared.url, timeout=25, headers={"Authorization": "Bearer second"}
        ) as client:
            assert await ask(client, 10) == 200
            slow = [asyncio.ensure_future(trickle(shared.url, statuses)) for _ in range(SLOW_BODIES)]
            try:
                await asyncio.sleep(1.0)
                for size in (70_000, 70_000, 900_000, 2_500_000, 70_000):
                    assert await ask(client, size) == 200, size
            finally:
                for one in slow:
                    one.cancel()
                await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(run())
    assert 408 in statuses and set(statuses) <= {408, 503}


def test_the_first_to_come_is_the_first_to_have_room() -> None:
    async def run() -> None:
        room, order = BodyMemory(32 * MIB), []
        oldest, held = BodyReservation(room, "a"), BodyReservation(room, "a")
        await oldest.hold(2 * MIB)
        await held.hold(4 * MIB)

        async def wait(name: int) -> None:
            place = BodyReservation(room, "a")
            await place.hold(4 * MIB)
            order.append(name)
            await asyncio.sleep(0)
            await place.leave()

        waiting = [asyncio.ensure_future(wait(number)) for number in range(6)]
        await asyncio.sleep(0.01)
        assert not order
        await held.leave()
        await asyncio.gather(*waiting)
        assert order == [*range(6)]

    asyncio.run(run())


def test_a_tenant_has_half_while_another_waits() -> None:
    async def run() -> None:
        room = BodyMemory(32 * MIB)
        oldest, first, second = BodyReservation(room, "a"), BodyReservation(room, "a"), BodyReservation(room, "a")
        await oldest.hold(16 * MIB)
        await first.hold(2 * MIB)  # it has 4 of the 8 MiB
        other = BodyReservation(room, "b")
        waits = asyncio.ensure_future(other.hold(4 * MIB))  # 8, beyond its half too: it waits on
        await asyncio.sleep(0)
        more = asyncio.ensure_future(second.hold(3 * MIB // 2))
        light = BodyReservation(room, "b")
        await light.hold(MIB)
        assert light.is_light and not waits.done()
        await asyncio.sleep(0.01)
        assert not more.done()
        await first.leave()
        await more  # within its half
        await second.leave()
        await oldest.leave()
        await light.leave()
        await waits

    asyncio.run(run())


def test_who_hardly_gets_on_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "TRICKLE_S", 0.05)
    monkeypatch.setattr(body_memory, "PATIENCE_S", 0.02)

    async def run() -> None:
        room = BodyMemory(32 * MIB)
        slow, quick, other = BodyReservation(room, "a"), BodyReservation(room, "a"), BodyReservation(room, "b")
        await slow.hold(4 * MIB)
        await quick.hold(4 * MIB)
        waiting = asyncio.ensure_future(other.hold(2 * MIB))
        end = time.monotonic() + 0.1
        num_bytes = 4 * MIB
        while time.monotonic() < end:
            num_bytes += 128 * 1024
            await quick.hold(num_bytes)
            await slow.hold(4 * MIB + 1)
            await asyncio.sleep(0.01)
        assert slow.is_overdue and not quick.is_overdue and not waiting.done()
        await quick.leave()
        await waiting

    asyncio.run(run())
