"""The router's queue: who waits for a row of any server, who is refused, and whose turn is next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from penstock.errors import Busy
from penstock.server.http.relay import ServerFacts
from penstock.server.router.admission import FleetQueue, QueuedCall
from penstock.server.router.http_client import Address
from penstock.server.router.pool import UpstreamPool
from penstock.server.router.prompts import PromptFacts
from penstock.server.router.upstream import MAX_KNOWN_PARTS, Upstream


class Rows:
    """Servers with so many rows, by the model that they have."""

    def __init__(self, queue: FleetQueue, **free: int) -> None:
        self.queue, self.free = queue, free
        self.order: list[str] = []
        self.refused: list[tuple[str, Busy]] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, tenant: str, kind: str = "m", num_prompt: int = 10) -> asyncio.Task[None]:
        def start() -> bool:
            if self.free[kind]:
                self.free[kind] -= 1
                return True
            return False

        async def run() -> None:
            try:
                await self.queue.enter(QueuedCall(tenant, num_prompt, kind, start))
                self.order.append(tenant)
            except Busy as error:
                self.refused.append((tenant, error))

        self.tasks.append(asyncio.ensure_future(run()))
        return self.tasks[-1]

    async def end(self, tenant: str, kind: str = "m", num_output: int = 0) -> None:
        """End an answer, and let those run whose turn it is."""
        self.free[kind] += 1
        self.queue.end(tenant, num_output, has_answer=True)
        await settle()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert not len(self.queue)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_tenants_take_turns_whatever_they_queued() -> None:
    async def test() -> None:
        rows = Rows(FleetQueue(100), m=1)
        for _ in range(20):
            rows.ask("greedy")
        await settle()
        rows.ask("late")
        rows.ask("late")
        await settle()
        assert rows.order == ["greedy"] and len(rows.queue) == 21
        for _ in range(5):
            await rows.end(rows.order[-1])
        assert rows.order[:5].count("late") == 2
        await rows.close()

    run(test)


def test_weights_and_outputs_count() -> None:
    async def test() -> None:
        rows = Rows(FleetQueue(1000, {"gold": 3.0, "plain": 1.0}), m=0)
        for _ in range(60):
            rows.ask("gold")
            rows.ask("plain")
        await settle()
        rows.free["m"] -= 1
        await rows.end("nobody")
        for _ in range(40):
            rows.free["m"] += 1
            await rows.end(rows.order[-1] if rows.order else "nobody", num_output=50)
            rows.free["m"] = 0
        assert rows.order[:40].count("gold") == pytest.approx(30, abs=2)
        await rows.close()

    run(test)


def test_a_full_queue_says_when_to_come_back() -> None:
    async def test() -> None:
        clock = [0.0]
        rows = Rows(FleetQueue(3, clock=lambda: clock[0]), m=1)
        for _ in range(4):
            rows.ask("one")
        await settle()
        for _ in range(10):
            clock[0] += 0.5
            rows.queue.throughput.count()
        rows.ask("one")
        await settle()
        ((tenant, error),) = rows.refused
        assert tenant == "one" and error.status == 429 and error.retry_after_s == 2  # 3 requests at 2.2 per second
        assert "3 requests are waiting, which is the limit; try again in 2 s" in str(error)
        assert len(rows.queue) == 3 and rows.queue.num_refused == 1
        await rows.close()

    run(test)


def test_one_below_its_share_displaces_the_newest_of_one_above() -> None:
    async def test() -> None:
        rows = Rows(FleetQueue(4), m=0)
        for _ in range(4):
            rows.ask("greedy")
        await settle()
        rows.ask("late")
        rows.ask("late")
        await settle()
        assert [tenant for tenant, _ in rows.refused] == ["greedy", "greedy"] and len(rows.queue) == 4
        assert "displaced" in str(rows.refused[0][1])
        rows.ask("late")
        await settle()
        assert [tenant for tenant, _ in rows.refused][2:] == ["late"], "it has its share"
        await rows.close()

    run(test)


def test_a_model_without_room_holds_up_no_other() -> None:
    async def test() -> None:
        rows = Rows(FleetQueue(100), busy=0, idle=2)
        rows.ask("one", "busy")
        rows.ask("one", "idle")
        rows.ask("two", "busy")
        rows.ask("two", "idle")
        await settle()
        assert sorted(rows.order) == ["one", "two"] and len(rows.queue) == 2
        await rows.close()

    run(test)


def test_who_leaves_is_passed_over() -> None:
    async def test() -> None:
        rows = Rows(FleetQueue(100), m=0)
        first, _ = rows.ask("one"), rows.ask("two")
        await settle()
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        assert len(rows.queue) == 1
        await rows.end("nobody")
        assert rows.order == ["two"]
        await rows.close()

    run(test)


def test_names_that_clients_choose_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.router.admission.MAX_TENANTS", 8)

    async def test() -> None:
        queue = FleetQueue(100)
        for number in range(1000):
            await queue.enter(QueuedCall(f"tenant {number}", 10, "m", lambda: True))
            queue.end(f"tenant {number}", 100, has_answer=True)
        assert len(queue.fair_shares._spent) <= 9 and not queue._tenants

    run(test)


def make_upstream(number: int = 0, facts: ServerFacts | None = None, **more: Any) -> Upstream:
    upstream = Upstream(number, Address.parse(f"http://127.0.0.1:{1000 + number}"), None, [], **more)
    upstream.is_ready = True
    upstream.facts = facts
    return upstream


def tell(upstream: Upstream, facts: ServerFacts | None) -> None:
    upstream._take_facts(b"" if facts is None else msgspec.json.encode(facts))


def test_another_cache_is_forgotten_and_its_size_followed() -> None:
    upstream, digests = make_upstream(), [bytes([number]) for number in range(9)]
    facts = ServerFacts("a", cache_tokens=1 << 16, rows=4)
    tell(upstream, facts)
    assert upstream.prefixes.max_blocks == 4096 and upstream.max_rows == 4
    upstream.prefixes.add(digests)
    upstream.die("a connection broke off")
    tell(upstream, facts)
    assert upstream.prefixes.count(digests) == 9, "the same cache, though it was not reached for a while"
    tell(upstream, msgspec.structs.replace(facts, cache="b"))
    assert upstream.prefixes.count(digests) == 0, "restarted between two heartbeats"
    tell(upstream, msgspec.structs.replace(facts, cache="b", cache_tokens=None))
    assert upstream.prefixes.max_blocks == MAX_KNOWN_PARTS, "a store keeps more than the cache"
    tell(upstream, msgspec.structs.replace(facts, cache="b", cache_tokens=1))
    assert upstream.prefixes.max_blocks == 512, "what requests under way have"


def test_a_server_that_tells_nothing_is_forgotten_when_it_was_lost() -> None:
    upstream, digests = make_upstream(max_rows=2), [b"a", b"b"]
    upstream.prefixes.add(digests)
    tell(upstream, None)
    assert upstream.prefixes.count(digests) == 2 and upstream.max_rows == 2
    for garbage in (b"{", b"[]", b'{"cache": 3}'):
        upstream._take_facts(garbage)
        assert upstream.prefixes.count(digests) == 2
    upstream.refuse("gone")
    tell(upstream, None)
    assert upstream.prefixes.count(digests) == 0


def test_rows_are_taken_and_given_back() -> None:
    pool = UpstreamPool([make_upstream(number, ServerFacts(str(number), rows=2)) for number in range(2)])
    facts = PromptFacts(num_rows=1)
    taken = []
    for expected in (0, 1, 0, 1):
        chosen, is_served = pool.choose_with_room(facts, None)
        assert chosen is not None and is_served and chosen.number == expected
        taken.append((chosen, pool.begin(chosen, facts)))
    assert pool.choose_with_room(facts, None) == (None, True)
    assert pool.choose_with_room(facts, taken[0][0]) == (None, True)
    pool.end(taken[1][0], facts, taken[1][1])
    assert pool.choose_with_room(facts, taken[0][0]) == (None, True), "it is another server's row"
    assert pool.choose_with_room(facts, None)[0] is taken[1][0]
    for one in pool:
        one.refuse("gone")
    assert pool.choose_with_room(facts, None) == (None, False), "there is nobody to wait for"


@pytest.mark.parametrize("policy", ["prefix", "round_robin", "least_busy"])
def test_a_session_stays_while_its_server_is_up(policy: str) -> None:
    pool = UpstreamPool([make_upstream(number) for number in range(3)], policy)
    facts: Any = PromptFacts(session="session:a", num_rows=1, num_bytes=1000)
    first = pool.choose(facts)
    assert first is not None
    pool.begin(first, facts)
    for number in range(7):
        other = pool.choose(PromptFacts(num_bytes=number))
        assert other is not None
        pool.begin(other, PromptFacts(num_bytes=number))
        assert pool.choose(facts) is first
    first.refuse("gone")
    second = pool.choose(facts)
    assert second is not None and second is not first
    pool.begin(second, facts)
    first.is_ready = True
    assert pool.choose(facts) is second, "it is held there now"
