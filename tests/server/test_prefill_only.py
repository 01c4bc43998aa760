"""Prompts that are computed for another server: what the dispatcher does with them, and which requests become some."""

from __future__ import annotations

import asyncio

import pytest

from penstock.engine.messages import HANDED_OVER, Abort, Add
from penstock.errors import EngineFailed
from penstock.server.config import PREFILL
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.dispatcher import Dispatcher
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.replica import MIN_HANDED_OVER
from penstock.server.handover.prefill import make_prefill
from penstock.types import BeamSearchParams, Delta, Request, SamplingParams


def open_prefill() -> tuple[Dispatcher, list[Request]]:
    """Return a dispatcher of one prefill engine, and what that is sent."""
    dispatcher, sent = Dispatcher(AdmissionQueue(100, 1 << 20)), list[Request]()

    def send(command: Add | Abort) -> None:
        if isinstance(command, Add):
            sent.append(command.request)

    replica = dispatcher.replicas.add(send, PREFILL)
    replica.transfer_port = 9001
    dispatcher.open(replica, 4, 8192)
    return dispatcher, sent


def make_flight(hand_over: bool) -> InFlightRequest:
    request = Request(id="one", tokens=tuple(range(100)), max_tokens=2, hand_over=hand_over)
    return InFlightRequest(request, None, None)


async def read(flight: InFlightRequest) -> int:
    return sum([len(batch) async for batch in flight.items()])


def test_a_prompt_ends_with_its_first_token_and_knows_its_port() -> None:
    dispatcher, sent = open_prefill()
    dispatcher.submit(flight := make_flight(True))
    dispatcher.handle_deltas([Delta("one", 0, (1,), finish_reason=HANDED_OVER)])
    assert len(sent) == 1 and not flight.is_open and flight.handed_over_at == 9001
    assert asyncio.run(read(flight)) == 1
    assert not dispatcher.flights and not len(dispatcher.parts)


def test_a_prompt_does_not_wait_for_another_engine() -> None:
    dispatcher, _ = open_prefill()
    dispatcher.submit(flight := make_flight(True))
    replica = next(iter(dispatcher.replicas))
    dispatcher.handle_death(replica, True)
    with pytest.raises(EngineFailed, match="have it computed elsewhere"):
        asyncio.run(read(flight))
    assert not dispatcher.flights


def test_whole_requests_of_a_lone_prefill_server_stay_whole() -> None:
    dispatcher, sent = open_prefill()
    dispatcher.submit(make_flight(False))
    assert [one.hand_over for one in sent] == [False]
    dispatcher.handle_death(next(iter(dispatcher.replicas)), True)
    assert len(dispatcher.flights) == 1, "it waits for the next engine"


def test_only_what_another_server_can_use_is_computed() -> None:
    tokens = tuple(range(MIN_HANDED_OVER))
    sampling = SamplingParams(temperature=0.7, n=3, max_tokens=50, stop=["x"])
    whole = Request(id="r", tokens=tokens, sampling=sampling, max_tokens=50, salt="4:them", num_public=16, seed=5)
    made = make_prefill(whole, 4096)
    assert made is not None and made.hand_over and made.num_siblings == 1
    assert (made.tokens, made.salt, made.num_public, made.max_tokens) == (tokens, "4:them", 16, 2)
    beam = BeamSearchParams(beam_width=2, max_tokens=4)
    for other in (
        Request(id="r", tokens=tokens[1:]),
        Request(id="r", tokens=tokens, beam=beam),
        Request(id="r", tokens=tokens, pool=True),
        Request(id="r", tokens=tokens, sampling=SamplingParams(prompt_logprobs=1)),
    ):
        assert make_prefill(other, 4096) is None
    assert make_prefill(whole, MIN_HANDED_OVER + 1) is None, "there is no room for the tokens that it ends with"
