"""Worlds of every kind, 200,000 steps of them, with every invariant checked as they run (see world.py).

`python -m tests.simulation.run --steps 100000000` goes on where this stops.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from tests.simulation.effort import QUICK
from tests.simulation.run import main
from tests.simulation.scenario import draw_scenario
from tests.simulation.world import World, simulate

SHARDS = 8  # `make test` runs the first
STEPS = 25_600  # per shard
WORLD_STEPS = 400
QUICK_STEPS = 6_000

# Per shard; over the whole run eight times as many. A simulation that stops meeting these tests nothing.
AT_LEAST = {
    "num_requests": 1000,
    "num_preemptions": 200,
    "num_evicted": 10_000,
    "num_cached_tokens": 8_000,
    "num_copies": 1000,
    "num_forks": 200,
    "num_aborted": 150,
    "num_refused": 50,
    "num_failed_steps": 60,
    "num_failed_rows": 4,
    "num_void": 50,
    "num_accepted_tokens": 100,
    "num_rejected": 200,
    "num_trees": 100,
    "num_path_moves": 50,
    "num_recomputed": 500,
    "num_saved": 3_000,
    "num_loaded": 300,
    "num_lost": 20,
    "end_stop": 150,
    "end_length": 700,
    "end_abort": 150,
    "end_error": 40,
    "abort_waiting": 15,
    "abort_preempted": 4,
    "abort_prefill": 8,
    "abort_decoding": 15,
    "abort_in_flight": 10,
    "abort_paused": 2,
    "abort_beam": 4,
    "abort_forked": 8,
    "abort_leader": 8,
    "abort_sibling": 10,
}


@pytest.mark.parametrize(
    "shard", [0] if QUICK else [pytest.param(shard, marks=[pytest.mark.slow] * (shard > 0)) for shard in range(SHARDS)]
)
def test_every_invariant_holds(shard: int) -> None:
    census: Counter[str] = Counter()
    for seed in count(1000 * shard):
        try:
            census.update(simulate(seed, WORLD_STEPS))
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: {error}; to see it again: python -m tests.simulation.run --workers 1 "
                f"--steps 1 --seed {seed} --world-steps {WORLD_STEPS}"
            ) from error
        if census["num_steps"] >= (QUICK_STEPS if QUICK else STEPS):
            break
    if not QUICK:
        missing = {name: census[name] for name, least in AT_LEAST.items() if census[name] < least}
        assert not missing, f"too few: {missing}"


def test_a_store_outlives_a_world() -> None:
    """The next world finds what the one before it left, whatever of it was lost meanwhile."""
    census: Counter[str] = Counter()
    for seed in range(500, 504 if QUICK else 512):
        scenario = replace(draw_scenario(seed), offloads=True, drop_rate=0.0)
        first = World(scenario)
        first.run(100)
        census.update(World(scenario, first.store).run(60))
    assert census["num_loaded"] > 20 and census["num_restored_tokens"] > 40, census


@pytest.mark.skipif(QUICK, reason="the command only repeats what the worlds check")
def test_the_command_runs_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "600", "--workers", "1", "--world-steps", "200", "--seed", "40"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert int(lines["num_steps"].replace(",", "")) >= 600
