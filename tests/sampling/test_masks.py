from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.sampling import RowState

ZEROS = np.zeros(10, dtype=np.float32)


def _forbidden(row: RowState) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.isneginf(row.edit(ZEROS)))]


def test_logit_bias_is_added(make_row: Callable[..., RowState]) -> None:
    edited = make_row(logit_bias={2: 1.5, 4: -100.0, 77: 3.0}).edit(np.ones(10, dtype=np.float32))
    assert edited.tolist() == [1, 1, 2.5, 1, -99, 1, 1, 1, 1, 1]


def test_logit_bias_comes_before_the_penalties(make_row: Callable[..., RowState]) -> None:
    """vLLM's order: the repetition penalty scales the biased logit. (2 + 4) / 2, not 2 / 2 + 4."""
    row = make_row(prompt=[3], logit_bias={3: 4.0}, repetition_penalty=2.0)
    assert row.edit(np.full(10, 2, dtype=np.float32))[3] == 3


def test_allowed_tokens_forbid_all_others(make_row: Callable[..., RowState]) -> None:
    assert _forbidden(make_row(allowed_token_ids=[3, 5, 5, 99])) == [0, 1, 2, 4, 6, 7, 8, 9]


def test_single_token_bad_words_are_always_forbidden(make_row: Callable[..., RowState]) -> None:
    assert _forbidden(make_row(bad_words=[[4], [7], [99]])) == [4, 7]


@pytest.mark.parametrize(
    ("generated", "forbidden"),
    [
        ([], []),
        ([5], [6]),
        ([5, 6], []),
        ([8, 5], [6]),
        ([1, 2], [3]),
        ([1, 2, 9], []),
        ([2], []),
        ([1, 1, 2], [3]),
        ([5, 6, 1, 2], [3]),
    ],
)
def test_longer_bad_words_forbid_their_last_token_after_the_others(
    make_row: Callable[..., RowState], generated: list[int], forbidden: list[int]
) -> None:
    """Bad words [5, 6] and [1, 2, 3]; breaks when only part of the word is compared or any of it is forbidden early."""
    assert _forbidden(make_row(prompt=[0], generated=generated, bad_words=[[5, 6], [1, 2, 3]])) == forbidden


def test_bad_words_lie_wholly_in_the_answer(make_row: Callable[..., RowState]) -> None:
    """As in vLLM, a word begun in the prompt is not meant."""
    assert _forbidden(make_row(prompt=[1, 5], bad_words=[[5, 6]])) == []
    assert _forbidden(make_row(prompt=[1], generated=[2], bad_words=[[1, 2, 3]])) == []


def test_min_tokens_forbids_every_stop_id_until_reached(make_row: Callable[..., RowState]) -> None:
    row = make_row(min_tokens=2, eos=[4, 88], stop_token_ids=[6])
    assert _forbidden(row) == [4, 6]
    row.append(0)
    assert _forbidden(row) == [4, 6]
    row.append(0)
    assert row.edit(ZEROS) is ZEROS
    row.truncate(len(row.tokens) - 1)
    assert _forbidden(row) == [4, 6]


def test_min_tokens_ends_where_other_masks_go_on(make_row: Callable[..., RowState]) -> None:
    row = make_row(min_tokens=1, eos=[4], bad_words=[[7]])
    assert _forbidden(row) == [4, 7]
    row.append(0)
    assert _forbidden(row) == [7]


def test_min_tokens_with_ignore_eos_leaves_eos(make_row: Callable[..., RowState]) -> None:
    assert _forbidden(make_row(min_tokens=2, eos=[4], stop_token_ids=[6], ignore_eos=True)) == [6]
    assert make_row(min_tokens=2, eos=[4], ignore_eos=True).edit(ZEROS) is ZEROS


def test_min_tokens_counts_the_answer_not_the_prompt(make_row: Callable[..., RowState]) -> None:
    assert _forbidden(make_row(prompt=[0] * 50, min_tokens=1, eos=[4])) == [4]


def test_masks_hold_against_any_bias_or_penalty(make_row: Callable[..., RowState]) -> None:
    """Breaks when a bias or a negative penalty could lift a masked token."""
    row = make_row(
        prompt=[0],
        generated=[4, 5],
        eos=[4],
        min_tokens=9,
        bad_words=[[5]],
        allowed_token_ids=[4, 5, 6],
        logit_bias={4: 100.0, 5: 100.0, 7: 100.0},
        presence_penalty=-2.0,
        repetition_penalty=0.1,
    )
    assert _forbidden(row) == [0, 1, 2, 3, 4, 5, 7, 8, 9]


def test_ids_that_no_vocabulary_has_name_nothing(make_row: Callable[..., RowState]) -> None:
    far = [1 << 70, 1 << 63]
    row = make_row(
        stop_token_ids=[3, *far], allowed_token_ids=[3, 5, *far], logit_bias={5: 1.0, 1 << 70: 9.0}, min_tokens=2
    )
    assert _forbidden(row) == [token for token in range(10) if token != 5]
    assert row.words(0, 8).tolist() == [1 << 5] and [len(part) for part in row.masks.bias] == [1, 1]
