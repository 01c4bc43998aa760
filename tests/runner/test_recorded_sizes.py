"""Which of the recorded steps is taken."""

from __future__ import annotations

import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock.ops.triton.tuning import CAPTURE_AFTER, SHORT_CONTEXT  # noqa: E402
from penstock.runner.cuda.decode_graphs import DecodeGraphs, bucket_sizes, num_kv_splits  # noqa: E402


def steps(recorded: list[tuple[int, bool]], eager: bool = False) -> DecodeGraphs:
    """With graphs of these sizes, shared or not."""
    made: Any = object.__new__(DecodeGraphs)
    made.sizes, made.num_wanted = [1, 2, 4, 8, 16, 32, 64], Counter()
    made.pool = SimpleNamespace(eager=eager, has_idle_moments=False)
    made.num_sms, made._kv_heads, made.deterministic = 132, 8, False
    made._known = {
        (size, shared, made.num_kv_splits(size, 1)): SimpleNamespace(forward=SimpleNamespace(graph=object()))
        for size, shared in recorded
    }
    return made


def test_one_that_is_recorded_is_taken() -> None:
    made = steps([(8, False), (32, False)])
    assert [made.pick(count, False, 1)[0] for count in (8, 7, 5, 30)] == [8, 8, 8, 32]
    assert not made.num_wanted


def test_a_larger_one_stands_in_until_the_right_one_is_wanted_often() -> None:
    """Breaks if every size that comes once is recorded, or if one that comes often never is."""
    made = steps([(32, False), (64, False)])
    assert [made.pick(10, False, 1)[0] for _ in range(CAPTURE_AFTER + 2)] == [32] * CAPTURE_AFTER + [16, 16]


def test_nothing_stands_in_for_the_largest_or_for_another_kind() -> None:
    made = steps([(16, False), (64, True)])
    assert made.pick(20, False, 1)[0] == 32
    assert made.pick(20, True, 1)[0] == 64
    assert made.pick(1, False, SHORT_CONTEXT + 1) == (16, False, 2)  # the same kernels as for short texts
    assert steps([(1, False)]).pick(1, False, SHORT_CONTEXT + 1) == (1, False, 32)


def test_in_how_many_parts_keys_are_read() -> None:
    counts = (1, 4, 16, 18, 32, 33, 64)
    assert [num_kv_splits(count, SHORT_CONTEXT, 8, 132) for count in counts] == [8, 8, 2, 1, 1, 1, 1]
    assert [num_kv_splits(count, SHORT_CONTEXT + 1, 8, 132) for count in counts] == [32, 8, 2, 2, 2, 1, 1]


def test_launched_one_by_one_every_size_is_its_own() -> None:
    assert steps([(64, False)], eager=True).pick(3, False, 1)[0] == 4


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 100, 256, 300])
def test_every_number_of_sequences_has_a_bucket(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for count in range(1, most + 1):
        assert next(size for size in sizes if size >= count) <= max(2 * count, count + 32)
