"""The rows of steps of single tokens, from one step to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.ops.sample import BAD
from penstock.runner.cuda.lineup import Lineup, ordered
from penstock.sampling.likeliest import DAMAGED

ROWS, STARTS = np.array([5, 2, 7]), np.array([3, 9, 4])


def devices() -> list[Any]:
    """With texts as long as their positions are far, one token more in the first."""
    return [SimpleNamespace(state=SimpleNamespace(simple=True, tokens=list(range(length)))) for length in (4, 9, 4)]


def lineup(known: list[Any] | None = None) -> Lineup:
    return Lineup(ROWS, known or devices(), STARTS, 8, num_admitted=3)


def test_the_longest_come_first() -> None:
    line = lineup()
    assert line.numbers.tolist() == [2, 7, 5] and line.starts.tolist() == [9, 4, 3]
    assert line.places(ROWS) == [2, 0, 1]
    assert ordered(["a", "b", "c"], line.places(ROWS)) == ["b", "c", "a"]
    assert line.tokens() == [-1, -1, 3], "only of one row is the token known here"


def test_the_same_rows_go_on_in_whatever_order_a_plan_has_them() -> None:
    line, turned = lineup(), [2, 0, 1]
    assert line.goes_on(ROWS, STARTS + 1, 3)
    assert line.goes_on(ROWS[turned], STARTS[turned] + 2, 3)
    assert line.numbers.tolist() == [2, 7, 5] and line.starts.tolist() == [11, 6, 5]
    assert line.places(ROWS[turned]) == [1, 2, 0]


def test_other_rows_and_other_positions_do_not() -> None:
    line = lineup()
    assert not line.goes_on(ROWS, STARTS, 3), "the same position once more"
    assert not line.goes_on(ROWS, STARTS + np.array([1, 1, 2]), 3), "a step of another kind came between"
    assert not line.goes_on(ROWS[:2], STARTS[:2] + 1, 3), "one has ended"
    assert not line.goes_on(np.array([5, 2, 6]), STARTS + 1, 3), "another row"
    assert not line.goes_on(ROWS, STARTS + 1, 4), "a row may be another sequence's"
    assert line.goes_on(ROWS, STARTS + 1, 3), "nothing was changed by asking"


def test_tokens_go_to_their_rows_and_damage_to_one() -> None:
    known = devices()
    line = lineup(known)
    assert line.take([10, 11, 12], line.places(ROWS)) == [12, 10, 11]
    assert [device.state.tokens[-1] for device in known] == [12, 10, 11]
    damaged, *others = line.take([20, 21, BAD], line.places(ROWS))
    assert not isinstance(damaged, int) and damaged.error == DAMAGED and others == [20, 21]
    assert [device.state.tokens[-1] for device in known] == [12, 20, 21]
