"""Which of the recorded steps is taken."""

from __future__ import annotations

import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock.runner.cuda.graphs import SELDOM, SHORT, SingleSteps, num_parts  # noqa: E402


def steps(recorded: list[tuple[int, bool]], eager: bool = False) -> SingleSteps:
    """With graphs of these sizes, shared or not."""
    made: Any = object.__new__(SingleSteps)
    made.sizes, made.eager, made._wanted = [1, 2, 4, 8, 16, 32, 64], eager, Counter()
    made._processors, made._kv_heads = 132, 8
    made._known = {
        (size, shared, made.num_parts(size, 1)): SimpleNamespace(forward=SimpleNamespace(graph=object()))
        for size, shared in recorded
    }
    return made  # type: ignore[no-any-return]


def test_one_that_is_recorded_is_taken() -> None:
    made = steps([(8, False), (32, False)])
    assert [made.fitting(count, False, 1)[0] for count in (8, 7, 5, 30)] == [8, 8, 8, 32]
    assert not made._wanted


def test_a_larger_one_stands_in_until_the_right_one_is_wanted_often() -> None:
    """Breaks if every size that comes once is recorded, or if one that comes often never is."""
    made = steps([(32, False), (64, False)])
    assert [made.fitting(10, False, 1)[0] for _ in range(SELDOM + 2)] == [32] * SELDOM + [16, 16]


def test_nothing_stands_in_for_the_largest_or_for_another_kind() -> None:
    made = steps([(16, False), (64, True)])
    assert made.fitting(20, False, 1)[0] == 32
    assert made.fitting(20, True, 1)[0] == 64
    assert made.fitting(1, False, SHORT + 1) == (16, False, 2)  # the same kernels as for short texts
    assert steps([(1, False)]).fitting(1, False, SHORT + 1) == (1, False, 32)


def test_in_how_many_parts_keys_are_read() -> None:
    counts = (1, 4, 16, 18, 32, 33, 64)
    assert [num_parts(count, SHORT, 8, 132) for count in counts] == [8, 8, 2, 1, 1, 1, 1]
    assert [num_parts(count, SHORT + 1, 8, 132) for count in counts] == [32, 8, 2, 2, 2, 1, 1]


def test_launched_one_by_one_every_size_is_its_own() -> None:
    assert steps([(64, False)], eager=True).fitting(3, False, 1)[0] == 4
