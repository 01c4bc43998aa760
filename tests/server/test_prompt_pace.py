"""A TTFT aim bounds the queue by measured pace."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import httpx
import pytest

from penstock.errors import Busy
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.prompt_pace import MIN_PROMPTS, PromptPace
from penstock.types import Request
from tests.server.running import RunningServer

numbers = itertools.count()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def flight(num_tokens: int = 1000, tenant: str = "") -> InFlightRequest:
    return InFlightRequest(Request(id=f"p{next(numbers)}", tokens=(1,) * num_tokens), None, None, tenant=tenant)


def measured(clock: Clock, ttft_s: float | None = 0.52) -> AdmissionQueue:
    """A queue whose prompts got their first tokens at 10,000 tokens a second, with pauses that do not count."""
    admission = AdmissionQueue(1000, 10**9, clock=clock, ttft_s=ttft_s)
    for _ in range(MIN_PROMPTS):
        one = flight()
        admission.enter(one)
        clock.now_s += 0.1
        assert admission.next() is one
        admission.pace.finish(one)
        clock.now_s += 50.0
    return admission


def test_refuses_beyond_twice_the_aim() -> None:
    clock = Clock()
    admission = measured(clock)
    for _ in range(10):  # one second of work
        admission.enter(flight())
    with pytest.raises(Busy) as refused:
        admission.enter(flight())
    error = str(refused.value)
    assert refused.value.retry_after_s == 1 and refused.value.status == 429
    assert "1.1 s" in error and "limit is 1.04 s" in error and "raise --ttft-slo-ms" in error
    assert len(admission) == 10 and admission.num_refused == 1


def test_nothing_is_refused_without_an_aim_or_a_measurement() -> None:
    admission = measured(Clock(), ttft_s=None)
    fresh = AdmissionQueue(1000, 10**9, clock=Clock(), ttft_s=0.001)
    for _ in range(100):
        admission.enter(flight())
        fresh.enter(flight())


def test_one_long_prompt_is_served_where_nothing_waits() -> None:
    admission = measured(Clock())
    admission.enter(flight(100_000))
    with pytest.raises(Busy):
        admission.enter(flight())


def test_another_tenants_queue_counts_as_long_as_ones_own() -> None:
    admission = measured(Clock())
    for _ in range(10):
        admission.enter(flight(tenant="greedy"))
    admission.enter(flight(tenant="small"))
    with pytest.raises(Busy):
        admission.enter(flight(tenant="greedy"))


def test_requests_that_leave_are_not_waited_for() -> None:
    admission = measured(Clock())
    waiting = [flight() for _ in range(10)]
    for one in waiting:
        admission.enter(one)
    for one in waiting[:5]:
        admission.leave(one)
        admission.pace.leave(one)
    admission.enter(flight())
    assert admission.pace.estimate_wait_s(flight()) == pytest.approx(0.7, rel=0.01)


def test_the_later_prompts_of_a_body_keep_nobody_waiting() -> None:
    admission = measured(Clock())
    admission.enter(*(flight() for _ in range(200)))
    assert admission.pace.estimate_wait_s(flight()) == pytest.approx(0.2, rel=0.01)


def test_a_new_engine_is_measured_anew() -> None:
    clock = Clock()
    admission = measured(clock)
    admission.enter(flight())
    clock.now_s += 300.0  # the engine was away
    admission.pace.restart()
    for _ in range(20):
        admission.enter(flight())


def test_the_pace_follows_the_device() -> None:
    clock = Clock()
    pace = PromptPace(1.0, clock)
    for seconds in [0.1] * 50 + [0.4] * 300:
        one = flight()
        pace.enter([one])
        clock.now_s += seconds
        pace.finish(one)
    pace.enter([flight()])
    assert pace.estimate_wait_s(flight()) == pytest.approx(0.8, rel=0.05)


def test_a_server_refuses_what_would_miss_its_aim(tiny_model: Path) -> None:
    arguments = ("--load-format", "dummy", "--threads", "1", "--ttft-slo-ms", "1", "--tpot-slo-ms", "5")
    body = {"max_tokens": 4, "ignore_eos": True}

    async def storm(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            posts = (client.post(url, json={"prompt": [20 + index] * 200, **body}) for index in range(40))
            return await asyncio.gather(*posts)

    with RunningServer(str(tiny_model), *arguments) as server:
        url = f"{server.url}/v1/completions"
        for index in range(MIN_PROMPTS):  # one at a time: nothing waits, nothing is refused
            assert httpx.post(url, json={"prompt": [20, 21 + index], **body}, timeout=60).status_code == 200
        answers = asyncio.run(storm(url))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    assert "--ttft-slo-ms" in refused[0].json()["error"]["message"]
