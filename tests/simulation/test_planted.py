"""Every planted bug is caught by the ordinary suites, and without one they pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation.bugs import BUGS, DRAFTERS, Bug, bug
from tests.simulation.planted import copy_core, copy_drafters, plant, suite_of, trial, trial_of_drafters

REQUIRED = [
    "an abort in the middle of a prompt releases nothing",
    "preemption releases a block twice",
    "a locked node is evicted",
    "a partial block is shared",
    "copy-on-write is skipped",
    "the budget is one token too large",
    "`computed` is not rolled back after rejected drafts",
    "sjf starves the long ones",
    "a window's usable prefix is off by one",
    "every draft is accepted",
    "an accepted path is not moved to its places",
    "a guess in a tree sees another branch",
    "a place too few is taken for drafts",
    "a restored block is another tenant's",
    "a block is loaded after the plan that reads it",
    "a block is saved before it is computed",
    "a lost block is taken for a hit",
]
DEFAULT = [  # of `make test`: of the cache, its tree, the scheduler, drafts and trees of them
    "a window's usable prefix is off by one",
    "a locked node is evicted",
    "the budget is one token too large",
    "`computed` is not rolled back after rejected drafts",
    "an accepted path is not moved to its places",
    "a guess in a tree sees another branch",
]


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(
            planted, id=planted.name.replace(" ", "-"), marks=[pytest.mark.slow] * (planted.name not in DEFAULT)
        )
        for planted in BUGS
    ],
)
def test_is_caught(planted: Bug, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    test = trial(planted, tmp_path)
    record_property("planted", (planted.name, suite_of(test), test.split("/")[-1]))
    assert test.startswith("tests/"), f"{planted.name}: {test or 'nobody noticed'}"


@pytest.mark.slow
@pytest.mark.parametrize("planted", DRAFTERS, ids=lambda planted: planted.name.replace(" ", "-"))
def test_bugs_in_drafters_are_caught(planted: Bug, tmp_path: Path) -> None:
    test = trial_of_drafters(planted, tmp_path)
    assert test.startswith("tests/draft/"), f"{planted.name}: {test or 'nobody noticed'}"


@pytest.mark.slow
def test_the_suites_pass_without_a_bug(tmp_path: Path) -> None:
    assert trial(None, tmp_path) == ""


def test_every_bug_can_be_planted(tmp_path: Path) -> None:
    """Those that only `make test-all` runs must keep up with the core too."""
    for number, planted in enumerate(BUGS):
        copy_core(tmp_path / str(number), suites=())
        plant(planted, tmp_path / str(number))
    for number, planted in enumerate(DRAFTERS):
        copy_drafters(tmp_path / f"draft{number}")
        plant(planted, tmp_path / f"draft{number}")


def test_there_are_enough_and_all_differ() -> None:
    assert len(BUGS) >= 28
    assert len({planted.name for planted in BUGS}) == len({planted.edits for planted in BUGS}) == len(BUGS)
    assert set(DEFAULT) < set(REQUIRED) <= {planted.name for planted in BUGS}


@pytest.mark.parametrize("old", ["no such text", "self"])
def test_an_edit_that_is_out_of_date_is_an_error(old: str, tmp_path: Path) -> None:
    copy_core(tmp_path / "copy")
    with pytest.raises(ValueError, match="not once"):
        plant(bug("stale", "cache/pool.py", old, "x"), tmp_path / "copy")
