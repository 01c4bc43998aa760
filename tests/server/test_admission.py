"""Who waits, who is refused, who goes next."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import httpx
import pytest

from penstock.errors import Busy
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.in_flight import InFlightRequest
from penstock.types import Request
from tests.server.running import RunningServer

numbers = itertools.count()


def flight(tenant: str = "", num_tokens: int = 10, priority: int = 0) -> InFlightRequest:
    request = Request(id=f"r{next(numbers)}", tokens=(1,) * num_tokens, priority=priority)
    return InFlightRequest(request, None, None, tenant=tenant)


def test_full_queue_refuses_with_a_time() -> None:
    clock = [0.0]
    admission = AdmissionQueue(3, 1000, clock=lambda: clock[0])
    for _ in range(3):
        admission.enter(flight())
    for _ in range(10):
        clock[0] += 0.5
        admission.throughput.count()
    with pytest.raises(Busy) as refused:
        admission.enter(flight())
    assert refused.value.retry_after_s == 2 and "limit is 3" in str(refused.value)  # 2.5 requests at 2.2 per second
    assert len(admission) == 3 and admission.num_refused == 1


def test_tokens_are_bounded_too_but_one_always_fits() -> None:
    admission = AdmissionQueue(100, 50)
    admission.enter(flight(num_tokens=80))
    with pytest.raises(Busy):
        admission.enter(flight(num_tokens=1))
    assert admission.next() is not None and admission.num_tokens == 0
    admission.enter(flight(num_tokens=30))
    admission.enter(flight(num_tokens=20))


def served(admission: AdmissionQueue, count: int, num_output: int = 0) -> list[str]:
    order = []
    for _ in range(count):
        one = admission.next()
        assert one is not None
        admission.fair_shares.charge(one.tenant, num_output=num_output)
        order.append(one.tenant)
    return order


def test_tenants_share_by_tokens_not_by_requests() -> None:
    admission = AdmissionQueue(1000, 10**6)
    for _ in range(40):
        admission.enter(flight("greedy", 100))
        admission.enter(flight("small", 10))
    order = served(admission, 33)
    assert order.count("small") == pytest.approx(30, abs=1)  # ten small ones for each large one


def test_weights_and_outputs_count() -> None:
    admission = AdmissionQueue(1000, 10**6, {"gold": 3.0})
    for _ in range(60):
        admission.enter(flight("gold"))
        admission.enter(flight("plain"))
    order = served(admission, 40, num_output=50)
    assert order.count("gold") == pytest.approx(30, abs=1)


def test_idleness_saves_nothing_up() -> None:
    admission = AdmissionQueue(1000, 10**6)
    for _ in range(50):
        admission.enter(flight("busy"))
    served(admission, 30)
    for _ in range(50):
        admission.enter(flight("late"))
    order = served(admission, 20)
    assert order.count("late") == pytest.approx(10, abs=1)


def test_priority_and_leaving() -> None:
    admission = AdmissionQueue(10, 1000)
    first, second, urgent = flight(), flight(), flight(priority=-1)
    for one in (first, second, urgent):
        admission.enter(one)
    assert admission.leave(first) and not admission.leave(first)
    assert admission.next() is urgent and admission.next() is second and admission.next() is None
    assert admission.num_tokens == 0


def test_overloaded_server_refuses_at_once_and_serves_the_rest(tiny_model: Path) -> None:
    arguments = ("--load-format", "dummy", "--threads", "1", "--max-num-seqs", "2", "--max-queued-requests", "4")

    async def storm(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(
                *(
                    client.post(
                        f"{url}/v1/completions", json={"prompt": [20, index], "max_tokens": 400, "ignore_eos": True}
                    )
                    for index in range(21, 61)
                )
            )

    with RunningServer(str(tiny_model), *arguments) as server:
        answers = asyncio.run(storm(server.url))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 14  # 10 in the engine, 4 waiting
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["Retry-After"]) >= 1
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            else:
                assert answer.json()["usage"]["completion_tokens"] == 400
        metrics = httpx.get(f"{server.url}/metrics").text
        assert f'penstock:requests_refused_total{{status="429"}} {float(statuses.count(429))}' in metrics


def test_deadline(tiny_model: Path) -> None:
    with RunningServer(str(tiny_model), "--load-format", "dummy", "--threads", "1") as server:
        answer = httpx.post(
            f"{server.url}/v1/completions",
            timeout=240,
            json={"prompt": [20], "max_tokens": 4000, "ignore_eos": True, "timeout": 0.3},
        )
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout"
