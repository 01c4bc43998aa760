"""Tenants that flood, hurry, retry without waiting, and send hundreds of prompts at once: others get their share."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.errors import Busy
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.in_flight import InFlightRequest
from tests.hardening.engines import hear, make_flight, running, until
from tests.server.running import RunningServer

pytestmark = pytest.mark.timeout(180)


def serve(admission: AdmissionQueue, count: int) -> list[InFlightRequest]:
    return [flight for _ in range(count) if (flight := admission.next()) is not None]


def test_priority_orders_within_a_tenant_only() -> None:
    admission = AdmissionQueue(100, 10_000)
    for number in range(20):
        admission.enter(make_flight(tenant="pushy", priority=-1 - number))
        admission.enter(make_flight(tenant="plain"))
    served = serve(admission, 20)
    assert Counter(flight.tenant for flight in served) == {"pushy": 10, "plain": 10}
    hurry = [flight.request.priority for flight in served if flight.tenant == "pushy"]
    assert hurry == sorted(hurry) and hurry[0] == -20


def test_engine_sees_no_priority_among_tenants(tmp_path: Path) -> None:
    async def run(folder: Path, weights: dict[str, float]) -> set[str]:
        folder.mkdir()
        async with running(folder, AdmissionQueue(100, 10_000, weights)) as engine:
            await engine.wait_ready()
            flights = [make_flight(tenant="a", priority=-5), make_flight(tenant="a", priority=3)]
            for flight in flights:
                engine.submit(flight)
            await asyncio.gather(*map(hear, flights))
        return {line.split()[1] for line in (folder / "begun").read_text().splitlines()}

    assert asyncio.run(run(tmp_path / "two", {"a": 1.0, "b": 1.0})) == {"0"}
    assert asyncio.run(run(tmp_path / "one", {"a": 1.0})) == {"-5", "3"}


@pytest.mark.parametrize(("max_requests", "max_tokens"), [(16, 10**6), (10**6, 160)])
def test_full_queue_makes_way_for_a_tenant_below_its_share(max_requests: int, max_tokens: int) -> None:
    admission = AdmissionQueue(max_requests, max_tokens)
    flood: list[InFlightRequest] = []
    with pytest.raises(Busy):
        while True:
            flood.append(make_flight(tenant="flood", num_tokens=10))
            admission.enter(flood[-1])
    assert len(admission) == 16  # all the room is used while nobody else wants it
    for _ in range(8):
        admission.enter(make_flight(tenant="other", num_tokens=10))
    with pytest.raises(Busy):
        admission.enter(make_flight(tenant="other", num_tokens=10))  # beyond its share
    assert Counter(flight.tenant for flight in admission) == {"flood": 8, "other": 8}
    refused = [flight for flight in flood[:16] if not flight.is_open]
    assert refused == flood[8:16]  # the newest

    async def hear_refusal() -> Busy:
        with pytest.raises(Busy) as error:
            await hear(refused[0])
        return error.value

    assert asyncio.run(hear_refusal()).retry_after_s >= 1


def test_shares_of_the_queue_follow_weights() -> None:
    admission = AdmissionQueue(40, 10**6, {"gold": 3.0})
    rng = random.Random(1)
    for _ in range(2000):
        for name in rng.sample(["gold", "plain"], 2):
            with contextlib.suppress(Busy):
                admission.enter(make_flight(tenant=name))
    assert Counter(flight.tenant for flight in admission) == {"gold": 30, "plain": 10}


def test_retries_that_do_not_wait_gain_nothing() -> None:
    admission, served = AdmissionQueue(8, 10**6), Counter[str]()
    for _ in range(200):
        for _ in range(25):
            with contextlib.suppress(Busy):
                admission.enter(make_flight(tenant="hammer"))
        admission.enter(make_flight(tenant="polite"))  # never refused
        served.update(flight.tenant for flight in serve(admission, 2))
    assert served["polite"] >= 199


def test_prompts_of_a_body_take_turns_with_other_requests() -> None:
    admission = AdmissionQueue(4, 100)
    admission.enter(*(make_flight(tenant="t", num_tokens=30) for _ in range(512)))  # larger than the queue
    small = [make_flight(tenant="t") for _ in range(3)]
    for flight in small:
        admission.enter(flight)
    assert len(admission) == 515
    assert [flight in small for flight in serve(admission, 8)] == [False, True, True, True, False, False, False, False]
    with pytest.raises(Busy, match="further prompts"):
        admission.enter(*(make_flight(tenant="t") for _ in range(512)))
    admission.enter(*(make_flight(tenant="u") for _ in range(2048)))  # another tenant's first body


def test_accounts_hold_under_random_load() -> None:
    rng, admission, entered = random.Random(7), AdmissionQueue(30, 400, {"a": 2.0}), set[InFlightRequest]()
    for _ in range(5000):
        what = rng.random()
        if what < 0.5:
            count = rng.choice([1, 1, 1, 5, 40])
            flights = [
                make_flight(tenant=rng.choice("abc"), num_tokens=rng.randrange(1, 60), priority=rng.randrange(-1, 2))
            ] * 1
            flights += [
                make_flight(
                    tenant=flights[0].tenant, num_tokens=rng.randrange(1, 60), priority=flights[0].request.priority
                )
                for _ in range(count - 1)
            ]
            try:
                admission.enter(*flights)
                entered |= set(flights)
            except Busy:
                pass
        elif what < 0.8:
            flight = admission.next()
            assert (flight is None) == (len(admission) == 0 and flight is None)
            entered.discard(flight)
            if flight is not None and rng.random() < 0.2:
                admission.put_back(flight)
                entered.add(flight)
        elif entered:
            flight = rng.choice(sorted(entered, key=lambda one: one.request.id))
            assert admission.leave(flight) == flight.is_open
            entered.discard(flight)
        entered = {flight for flight in entered if flight.is_open}
        assert set(admission) == entered and len(admission) == len(entered)
        heads = {flight.queue for flight in entered}
        assert admission.num_tokens == sum(len(queue.first.request.tokens) for queue in heads if queue is not None)
    for flight in list(entered):
        admission.leave(flight)
    assert len(admission) == 0 and admission.num_tokens == 0 and admission.next() is None


@pytest.mark.parametrize(("num_prompts", "n"), [(512, 1), (30, 128)])
def test_a_large_body_keeps_nobody_of_its_tenant_out(tmp_path: Path, num_prompts: int, n: int) -> None:
    """Not even one whose answers are long and take all the engine's rows."""

    async def run() -> None:
        async with running(tmp_path, AdmissionQueue(8, 10_000), rows=8, step_s=0.001) as engine:
            await engine.wait_ready()
            large = [make_flight(max_tokens=4000, n=n) for _ in range(num_prompts)]
            engine.submit(*large)
            await until(lambda: len(engine.dispatcher.parts) and large[0].outputs[0])
            for _ in range(5):
                small = make_flight(max_tokens=20)
                engine.submit(small)
                await hear(small)
                assert all(flight.is_open for flight in large)  # not one of its answers had to end first
            engine.abort(*large)
            assert not engine.is_busy

    asyncio.run(run())


def test_a_tenant_finds_a_row_beside_a_flood(tmp_path: Path) -> None:
    """Also where every row is taken by long answers; those go on later, token for token."""

    async def run() -> None:
        async with running(tmp_path, AdmissionQueue(64, 10_000, {"flood": 1.0, "other": 1.0}), rows=8) as engine:
            await engine.wait_ready()
            flood = [make_flight(max_tokens=150, tenant="flood", n=1 + index % 2) for index in range(30)]
            for flight in flood:
                engine.submit(flight)
            heard = [asyncio.ensure_future(hear(flight)) for flight in flood]
            await until(lambda: flood[0].outputs[0])
            others = [make_flight(max_tokens=20, tenant="other") for _ in range(4)]
            for flight in others:
                engine.submit(flight)
            await asyncio.gather(*map(hear, others))
            assert all(flight.is_open for flight in flood)
            await asyncio.gather(*heard)

    asyncio.run(run())


# the server as a whole

ARGUMENTS = ("--load-format", "dummy", "--threads", "1", "--max-num-seqs", "4", "--max-queued-requests", "8")


@pytest.mark.slow
def test_flood_of_one_key(tiny_model: Path) -> None:
    """40 clients of one key, with the best priority, that never wait; those of the other key are all served."""

    async def storm(url: str) -> Counter[int]:
        statuses, done = Counter[int](), asyncio.Event()
        limits = httpx.Limits(max_connections=None)

        async def ask(client: httpx.AsyncClient, key: str, **more: Any) -> int:
            answer = await client.post(
                "/v1/completions",
                headers={"x-api-key": key},
                json={"prompt": [20, 21], "max_tokens": 40, "ignore_eos": True, **more},
            )
            return answer.status_code

        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

            async def hammer() -> None:
                while not done.is_set():
                    statuses[await ask(client, "flood", priority=-1)] += 1

            hammers = [asyncio.ensure_future(hammer()) for _ in range(40)]
            while not statuses[429]:
                assert set(statuses) <= {200}
                await asyncio.sleep(0.01)
            assert [await ask(client, "other") for _ in range(10)] == [200] * 10
            done.set()
            await asyncio.gather(*hammers)
        return statuses

    with RunningServer(str(tiny_model), *ARGUMENTS, "--api-key", "flood", "--api-key", "other") as server:
        statuses = asyncio.run(storm(server.url))
    assert set(statuses) == {200, 429}


@pytest.mark.slow
def test_bodies_larger_than_the_queue(tiny_model: Path) -> None:
    async def storm(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            large = asyncio.ensure_future(
                client.post(
                    "/v1/completions",
                    json={
                        "prompt": [[20, 21 + index % 200] for index in range(512)],
                        "max_tokens": 16,
                        "ignore_eos": True,
                        "return_token_ids": True,
                    },
                )
            )
            await asyncio.sleep(0.3)
            for _ in range(3):
                answer = await client.post("/v1/completions", json={"prompt": [20], "max_tokens": 4})
                assert answer.status_code == 200 and not large.done()
            choices = (await large).json()["choices"]
            assert [len(choice["token_ids"]) for choice in choices] == [16] * 512
            many = await client.post(
                "/v1/completions",
                json={"prompt": [[20], [21]], "n": 20, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True},
            )
            assert [choice["index"] for choice in many.json()["choices"]] == list(range(40))
            assert all(len(choice["token_ids"]) == 4 for choice in many.json()["choices"])

    with RunningServer(str(tiny_model), *ARGUMENTS) as server:
        asyncio.run(storm(server.url))


def test_answers_that_fill_the_cache_stall_no_other_tenant(tiny_model: Path) -> None:
    """63 answers of one key grow until the cache is full, and on; the other key's answer gets a token at each step."""

    async def figures(client: httpx.AsyncClient) -> Counter[str]:
        lines = (await client.get("/metrics", headers={"x-api-key": "admin"})).text.splitlines()
        values = [line.rsplit(" ", 1) for line in lines if "_total{" in line]
        return Counter({name.split("{")[0]: int(float(value)) for name, value in values})

    async def storm(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            flood = asyncio.ensure_future(
                client.post(
                    "/v1/completions",
                    headers={"x-api-key": "k1"},
                    json={"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "n": 63},
                )
            )
            while not (await figures(client))["penstock:num_preemptions_total"]:
                assert not flood.done()
                await asyncio.sleep(0.05)
            begun, count = await figures(client), 0
            async with client.stream(
                "POST",
                "/v1/completions",
                headers={"x-api-key": "k2"},
                json={"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": True},
            ) as answer:
                async for line in answer.aiter_lines():
                    count += line.startswith("data: {")
            ended = await figures(client)
            assert count >= 100 and not flood.done()
            assert (ended - begun)["penstock:engine_steps_total"] < 400  # also those before its first token
            flood.cancel()

    arguments = ("--load-format", "dummy", "--threads", "1", "--kv-cache-tokens", "16384")
    with RunningServer(
        str(tiny_model), *arguments, "--api-key", "k1", "--api-key", "k2", "--admin-key", "admin"
    ) as server:
        asyncio.run(storm(server.url))
