"""The rows of steps of single tokens, from one step to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.ops.sampling.sample import BAD
from penstock.runner.cuda.decode_batch import DecodeBatch, put_in_order
from penstock.sampling.row import Chooser
from penstock.sampling.topk import DAMAGED

ROWS, STARTS = np.array([5, 2, 7]), np.array([3, 9, 4])


def devices() -> list[Any]:
    """With texts as long as their positions are far, one token more in the first."""
    return [
        SimpleNamespace(
            state=SimpleNamespace(chooser=Chooser.DEVICE, is_steady=True, num_logprobs=None, tokens=list(range(length)))
        )
        for length in (4, 9, 4)
    ]


def batch(known: list[Any] | None = None) -> DecodeBatch:
    return DecodeBatch(ROWS, known or devices(), STARTS, 8, num_admitted=3)


def test_the_longest_come_first() -> None:
    found = batch()
    assert found.numbers.tolist() == [2, 7, 5] and found.starts.tolist() == [9, 4, 3]
    assert found.places(ROWS) == [2, 0, 1]
    assert put_in_order(["a", "b", "c"], found.places(ROWS)) == ["b", "c", "a"]
    assert found.tokens() == [-1, -1, 3], "only of one row is the token known here"


def test_the_same_rows_go_on_in_whatever_order_a_plan_has_them() -> None:
    found, turned = batch(), [2, 0, 1]
    assert found.advance(ROWS, STARTS + 1, 3)
    assert found.advance(ROWS[turned], STARTS[turned] + 2, 3)
    assert found.numbers.tolist() == [2, 7, 5] and found.starts.tolist() == [11, 6, 5]
    assert found.places(ROWS[turned]) == [1, 2, 0]


def test_other_rows_and_other_positions_do_not() -> None:
    found = batch()
    assert not found.advance(ROWS, STARTS, 3), "the same position once more"
    assert not found.advance(ROWS, STARTS + np.array([1, 1, 2]), 3), "a step of another kind came between"
    assert not found.advance(ROWS[:2], STARTS[:2] + 1, 3), "one has ended"
    assert not found.advance(np.array([5, 2, 6]), STARTS + 1, 3), "another row"
    assert not found.advance(ROWS, STARTS + 1, 4), "a row may be another sequence's"
    assert found.advance(ROWS, STARTS + 1, 3), "nothing was changed by asking"


def test_tokens_go_to_their_rows_and_damage_to_one() -> None:
    known = devices()
    found = batch(known)
    assert found.append([10, 11, 12], found.places(ROWS)) == [12, 10, 11]
    assert [device.state.tokens[-1] for device in known] == [12, 10, 11]
    damaged, *others = found.append([20, 21, BAD], found.places(ROWS))
    assert not isinstance(damaged, int) and damaged.error == DAMAGED and others == [20, 21]
    assert [device.state.tokens[-1] for device in known] == [12, 20, 21]
