"""The choice of a replica, without engines: a simulated fleet, and the digests that it compares."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleet.engines import FleetModel, least_busy, take_turns
from bench.fleet.workloads import ask_tree
from penstock.engine.messages import Abort, Add
from penstock.server.config import BOTH, DECODE, PREFILL
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.dispatcher import Dispatcher
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.prefixes import BLOCK_TOKENS, SentPrefixes, digest_blocks
from penstock.server.engines.replica import MAX_AHEAD, RECOMPUTE, ROW_TOKENS, Replica, choose_replica
from penstock.types import Delta, Request

KEY = b"k" * 32
TREE = [list(range(256)), list(range(1000, 1256))]


def _replica(number: int, *prompts: list[int], num_rows: int = 0, max_blocks: int = 4096) -> Replica:
    replica = Replica(number, lambda command: None)
    replica.open(8, max_blocks * BLOCK_TOKENS, 0.0)
    for prompt in prompts:
        replica.prefixes.add(digest_blocks((), prompt))
    replica.num_rows = num_rows
    return replica


def test_longest_prefix_wins_until_computing_anew_costs_less() -> None:
    prompt = list(range(320))
    digests = digest_blocks((), prompt)
    long, short, none = _replica(0, prompt), _replica(1, prompt[:160]), _replica(2)
    assert choose_replica([none, short, long], digests) is long
    long.num_rows = RECOMPUTE * 160 // ROW_TOKENS - 1
    assert choose_replica([none, short, long], digests) is long
    long.num_rows += 2
    assert choose_replica([none, short, long], digests) is short
    short.num_rows = long.num_rows = 10_000
    assert choose_replica([none, short, long], digests) is none


def test_short_prefix_that_all_have_chooses_nobody() -> None:
    system = list(range(32))
    replicas = [_replica(number, system + [number] * 32) for number in range(3)]
    replicas[0].num_rows = replicas[1].num_rows = 3
    assert choose_replica(replicas, digest_blocks((), system + [7] * 320)) is replicas[2]


def test_new_prompts_spread_over_the_caches() -> None:
    replicas = [_replica(number, max_blocks=64) for number in range(4)]
    for index in range(16):
        digests = digest_blocks((), [index * 1000 + at for at in range(256)])
        choose_replica(replicas, digests).prefixes.add(digests)
    assert [len(one.prefixes) for one in replicas] == [64] * 4


def test_digests_are_equal_between_processes_and_apart_by_root_and_key() -> None:
    told = "from penstock.server.engines.prefixes import *; print(digest_blocks(('a', '', ()), range(64), b'k' * 32))"
    hashed = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, env=hashed).stdout
    mine = digest_blocks(("a", "", ()), range(64), KEY)
    assert found.strip() == repr(mine) and len(mine) == 64 // BLOCK_TOKENS
    for other in (("b", "", ()), ("a", "s", ()), ("a", "", ("lora",))):  # tenant, salt, adapter
        assert not set(digest_blocks(other, range(64), KEY)) & set(mine)
    assert not set(digest_blocks(("a", "", ()), range(64), b"j" * 32)) & set(mine)
    assert digest_blocks(("a", "", ()), range(BLOCK_TOKENS - 1), KEY) == ()


@given(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=40), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_known_prefixes_are_bounded_and_forget_ends_first(prompts: list[list[int]], max_blocks: int) -> None:
    known = SentPrefixes(max_blocks)
    for prompt in prompts:
        path = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        known.add(path)
        assert len(known) <= max_blocks and known.count(path) == min(len(path), max_blocks)
        held: set[Any] = set(known._known)
        assert all(one[:-1] in held for one in held if len(one) > 1)  # no block without those before it


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_fleet_serves_all_and_keeps_its_counts(data: Any) -> None:
    size = data.draw(st.integers(1, 4))
    fleet = FleetModel(size, 4096, data.draw(st.integers(1, 4)))
    answers: list[list[int]] = []
    count = data.draw(st.integers(1, 30))
    for _ in range(count):
        prompt = data.draw(st.sampled_from(TREE))[: data.draw(st.integers(1, 256))]
        num, at = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 500))
        fleet.at(float(at), partial(fleet.ask, prompt, num, answers.append))
    fleet.run()
    assert len(answers) == count and not fleet.dispatcher.flights and not len(fleet.dispatcher.parts)
    for replica in fleet.dispatcher.replicas:
        assert replica.num_rows == replica.num_pending == replica.work == 0


@pytest.mark.parametrize("gap", [2000.0, 60.0])
def test_four_replicas_compute_little_more_than_one_cache(gap: float) -> None:
    def count(fleet: FleetModel) -> int:
        for number in range(96):
            prompt = [number % 13 * 1000 + at for at in range(400)] + [number * 7777 + at for at in range(40)]
            fleet.at(gap * number, partial(fleet.ask, prompt, 16, lambda answer: None))
        fleet.run()
        return fleet.num_computed

    own, one, turns = (
        count(FleetModel(4, 4096, 4)),
        count(FleetModel(1, 16384, 16)),
        count(FleetModel(4, 4096, 4, take_turns())),
    )
    assert own <= 1.1 * one and own <= 0.6 * turns


@pytest.mark.parametrize("seed", [0, 1])
def test_a_flood_keeps_documents_together_and_all_replicas_busy(seed: int) -> None:
    def run(fleet: FleetModel) -> FleetModel:
        ask_tree(fleet, seed, 20.0, 250)
        fleet.run()
        return fleet

    own, one, least = (
        run(FleetModel(4, 16384, 8)),
        run(FleetModel(1, 65536, 32)),
        run(FleetModel(4, 16384, 8, least_busy)),
    )
    assert own.num_computed <= 1.2 * one.num_computed and own.num_computed <= 0.6 * least.num_computed
    assert own.imbalance < 1.15 and own.now < 0.8 * least.now
    assert sum(own.waits.values()) < 0.8 * sum(least.waits.values())


def test_a_flood_for_one_document_spreads_over_all() -> None:
    fleet = FleetModel(4, 16384, 8)
    for number in range(200):
        prompt = [*range(4000), *(number * 7777 + at for at in range(40))]
        fleet.at(20.0 * number, partial(fleet.ask, prompt, 40, lambda answer: None))
    fleet.run()
    assert fleet.imbalance < 1.1 and fleet.num_computed <= 4 * 4000 + 200 * (40 + BLOCK_TOKENS)


def _flight(*tokens: int) -> InFlightRequest:
    return InFlightRequest(Request(id=secrets.token_hex(4), tokens=tokens, max_tokens=1), None, None)


def _open_pair(*roles: str) -> tuple[Dispatcher, list[list[str]]]:
    """Return a dispatcher of two engines with two rows each, and the ids that each engine was sent."""
    dispatcher, sent = Dispatcher(AdmissionQueue(10_000, 1 << 20)), [list[str](), list[str]()]
    for ids, role in zip(sent, roles or (BOTH, BOTH)):

        def send(command: Add | Abort, ids: list[str] = ids) -> None:
            if isinstance(command, Add):
                ids.append(command.request.id)

        dispatcher.open(dispatcher.replicas.add(send, role), 2, 8192)
    return dispatcher, sent


def _answer(dispatcher: Dispatcher, ids: list[str]) -> None:
    """Give each request its first token."""
    dispatcher.handle_deltas([Delta(id, 0, (1,)) for id in ids])


def _end(dispatcher: Dispatcher, id: str) -> None:
    dispatcher.handle_deltas([Delta(id, 0, (1,), finish_reason="stop")])


def test_a_request_waits_for_the_engine_that_knows_it() -> None:
    dispatcher, sent = _open_pair()
    flights = [_flight(*range(4096), number) for number in range(2 + MAX_AHEAD)]
    dispatcher.submit(*flights)
    _answer(dispatcher, sent[0])
    late = [_flight(*range(4096), number) for number in range(100, 104)]
    dispatcher.submit(*late)
    assert [len(ids) for ids in sent] == [2 + MAX_AHEAD, 0], "they wait for less than 4096 tokens"
    other = _flight(*range(9000, 9400))
    dispatcher.submit(other)
    assert sent[1] == [other.request.id], "it passes those that wait for the first engine"
    _end(dispatcher, sent[0][0])
    assert sent[0][-1] == late[0].request.id, "the first that waits has the next place"
    dispatcher.abort(*flights, *late, other)
    assert not len(dispatcher.admission) and not len(dispatcher.parts)


def test_enough_waiting_requests_move_together_to_an_idle_engine() -> None:
    dispatcher, sent = _open_pair()
    large, small = range(10_000, 12_000), range(320)
    flights = [_flight(*large, number) for number in range(2 + MAX_AHEAD)]
    dispatcher.submit(*flights)
    _answer(dispatcher, sent[0])
    few, many = _flight(*large, 5), [_flight(*small, number) for number in range(4)]
    dispatcher.replicas.choose(few).prefixes.add(many[0].digests)
    find_movable = dispatcher.replicas.find_movable
    assert find_movable([few, *many], 5) == [1, 2, 3, 4], "320 tokens for four of them, and not 2000 for one"
    assert find_movable([few], 1) == [] and find_movable([few], 100) == [0], "a hundred of them are worth 2000 tokens"
    for flight in (few, *many):
        dispatcher.submit(flight)
    _answer(dispatcher, sent[1])
    assert sent[1] == [one.request.id for one in many] and list(dispatcher.admission) == [few]


def test_a_full_prefill_engine_does_not_block_the_others() -> None:
    dispatcher, sent = _open_pair(PREFILL, DECODE)
    flights = [_flight(*(number * 1000 + at for at in range(100))) for number in range(200)]
    dispatcher.submit(*flights)
    short = _flight(1, 2, 3)
    dispatcher.submit(short)
    assert short.request.id in sent[1] and len(sent[0]) > 2 + MAX_AHEAD
