"""The search on a simulated machine: gains are found, noise is not taken for one; and the command on a real one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.api.tune.search import Aim, Options, Run, Search, parse_aim
from penstock.cli import main
from penstock.errors import InvalidConfig
from tests.llm import tiny

KNOBS = {"max_num_seqs": [8, 16, 32], "max_num_batched_tokens": [128, 256, 1024], "threads": [1, 2]}


def machine(seed: int, gains: dict[tuple[str, int], float], noise: float) -> Callable[[Options], Run]:
    chance = random.Random(seed)

    def measure(options: Options) -> Run:
        speed = 100.0 * chance.gauss(1.0, noise)
        for (name, value), gain in gains.items():
            speed *= 1.0 + gain * (options.get(name) == value)
        return Run(speed, 20_000 / speed, 1000 / speed)

    return measure


def test_noise_is_no_gain() -> None:
    """Of forty searches without any gain to find, at most one recommends something, and none much."""
    found = []
    for seed in range(40):
        search = Search(machine(seed, {}, 0.05), Aim(), KNOBS, 16)
        search.run({})
        assert search.num_trials == 1 + 3 + 3 + 2
        if search.is_gain:
            found.append(seed)
    assert len(found) <= 1


def test_gains_are_found_and_add_up() -> None:
    gains = {("max_num_seqs", 32): 0.3, ("threads", 1): 0.4}
    for seed in range(10):
        search = Search(machine(seed, gains, 0.02), Aim(), KNOBS, 16)
        search.run({"dtype": "float32"})
        assert search.is_gain and search.is_confirmed and search.best is not None
        assert {"dtype": "float32", "max_num_seqs": 32, "threads": 1}.items() <= search.best.options.items()


def test_the_number_of_trials_is_bounded() -> None:
    search = Search(machine(0, {}, 0.0), Aim(), KNOBS, 4)
    search.run({})
    assert search.num_trials == 4


def test_an_interrupt_keeps_the_best() -> None:
    steady, count = machine(0, {("max_num_seqs", 16): 0.5}, 0.001), 0

    def measure(options: Options) -> Run:
        nonlocal count
        count += 1
        if count == 14:
            raise KeyboardInterrupt
        return steady(options)

    search = Search(measure, Aim(), KNOBS, 16)
    with pytest.raises(KeyboardInterrupt):
        search.run({})
    assert search.is_gain and not search.is_confirmed
    assert search.best is not None and search.best.options["max_num_seqs"] == 16


def test_options_that_are_refused_are_passed_over() -> None:
    def measure(options: Options) -> Run:
        if "threads" in options:
            raise InvalidConfig("no")
        return Run(100.0 + options.get("max_num_seqs", 0), 1.0, 1.0)

    search = Search(measure, Aim(), {"threads": [1], "max_num_seqs": [8]}, 16)
    search.run({})
    assert search.best is not None and search.best.options == {"max_num_seqs": 8} and search.is_gain


def test_limits_come_before_speed() -> None:
    aim = parse_aim("ttft=200, tpot=30")
    slow, late, good = Run(50.0, 100.0, 20.0), Run(500.0, 900.0, 20.0), Run(60.0, 190.0, 30.0)
    assert aim.score(late) < 1.0 < aim.score(slow) < aim.score(good)
    assert parse_aim("throughput").score(late) > parse_aim("throughput").score(good)
    for wrong in ("", "speed", "ttft", "ttft=0", "ttft=1,ttft=2", "tpot=-3", "ttft=1e99"):
        with pytest.raises(InvalidConfig, match="--aim"):
            parse_aim(wrong)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.write_config(tmp_path / "plain")
    load = ["--concurrency", "3", "--prompt-tokens", "8", "--output-tokens", "4", "--trials", "3", "--repeats", "2"]
    given = ["tune", folder, "--load-format", "dummy", "--threads", "1", "--json"]
    assert main([*given, *load]) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert facts["trials"] == 3 and facts["options"]["threads"] == 1 and len(facts["before"]) in (2, 3)
    assert shown.err.count("tokens/s, first token") == 2  # progress, a line a trial
    assert main([*given, "--aim", "fast"]) == 1 and "--aim 'fast'" in capsys.readouterr().err
