"""Lines of several drafters in one tree."""

from __future__ import annotations

import random

import pytest

from penstock.draft.drafters import Drafters, RowDrafts
from penstock.draft.merge import merge_lines
from penstock.draft.ngram import NgramDrafter
from penstock.draft.prediction import PredictionDrafter
from penstock.engine.draft_tree import compute_path_chances, find_paths, follow, is_line
from penstock.engine.plan import Draft
from penstock.sampling.row import RowState
from penstock.types import Request
from penstock.types.speculation import PREDICTION


def line(tokens: list[int], chance: float, drafter: str = "a") -> tuple[Draft, ...]:
    return tuple(Draft(token, i - 1, chance, drafter) for i, token in enumerate(tokens))


def tokens_of(tree: tuple[Draft, ...]) -> list[tuple[int, int]]:
    return [(one.token, one.parent) for one in tree]


def test_common_prefixes_are_one() -> None:
    tree = merge_lines([line([1, 2, 3], 0.5), line([1, 2, 4, 5], 0.6, "b")])
    assert tokens_of(tree) == [(1, -1), (2, 0), (4, 1), (5, 2), (3, 1)]
    assert [one.chance for one in tree] == pytest.approx([0.6, 0.6, 0.6, 0.6, 0.4 * 0.5])
    assert [one.drafter for one in tree] == ["a", "a", "b", "b", "a"]


def test_the_likeliest_path_lies_in_order() -> None:
    tree = merge_lines([line([1, 2], 0.3), line([7, 8], 0.9), line([5], 0.5)])
    assert tokens_of(tree) == [(7, -1), (8, 0), (5, -1), (1, -1), (2, 3)]
    assert sum(one.chance for one in tree if one.parent == -1) < 1


def test_one_line_stays_as_it_is() -> None:
    assert merge_lines([line([1, 2], 0.3), ()]) == line([1, 2], 0.3) and merge_lines([]) == merge_lines([()]) == ()


def test_a_prediction_is_counted_as_one() -> None:
    tree = merge_lines([line([1], 0.9), line([1], 0.2, PREDICTION)])
    assert [(one.drafter, one.chance) for one in tree] == [(PREDICTION, 0.9)]


def test_every_line_is_in_the_tree() -> None:
    rng = random.Random(4)
    for _ in range(200):
        lines = [line([rng.randrange(3) for _ in range(rng.randrange(6))], rng.random()) for _ in range(3)]
        tree = merge_lines(lines)
        assert all(len(follow(tree, [one.token for one in each])) == len(each) for each in lines)
        assert len({tuple(tree[i].token for i in path) for path in find_paths(tree)}) == len(tree)
        assert all(0 <= one.chance <= 1 for one in tree) and max(compute_path_chances(tree), default=0) <= 1


def test_drafters_merge_where_they_are_told_to() -> None:
    request = Request(id="r", tokens=(1, 2, 3, 9, 1, 2), max_tokens=50, prediction=(7, 8))
    state = RowState(request, 0, list(request.tokens), 6)
    for merges in (True, False):
        drafts = Drafters([PredictionDrafter(), NgramDrafter()], 2, merges).start(state)
        assert isinstance(drafts, RowDrafts)
        found = drafts.propose(2, 0.0)
        assert is_line(found) != merges
        assert {one.token for one in found} == ({7, 8, 3, 9} if merges else {7, 8})
