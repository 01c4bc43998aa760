"""The choice of a replica, without engines: a simulated fleet, and the digests that it compares."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleet.engines import FleetModel, take_turns
from penstock.server.engines.prefixes import BLOCK_TOKENS, SentPrefixes, digest_blocks
from penstock.server.engines.replica import RECOMPUTE, ROW_TOKENS, Replica, choose_replica

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
