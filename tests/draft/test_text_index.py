"""The index against a naive search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.draft.text_index import END, MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, TextIndex

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest(tokens: list[int], tail: list[int], last: int) -> int:
    """The longest match of the tail's end before index `last`, followed by a token."""
    best = 0
    for at in range(last):
        length = 0
        while length < min(MAX_MATCH, len(tail), at + 1) and tokens[at - length] == tail[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= MIN_MATCH else 0


@given(TEXTS)
def test_a_text_finds_its_own_end_earlier(tokens: list[int]) -> None:
    found = TextIndex(tokens).find(tokens, is_own=True)
    assert (found.length if found else 0) <= longest(tokens, tokens, len(tokens) - 1)
    if len(tokens) <= MAX_CANDIDATES:  # all places are compared
        assert (found.length if found else 0) == longest(tokens, tokens, len(tokens) - 1)
    if found is not None:
        assert tokens[found.after - found.length : found.after] == tokens[-found.length :]


@given(TEXTS, TEXTS)
def test_a_tail_is_found_in_another_text(tokens: list[int], tail: list[int]) -> None:
    found = TextIndex(tokens).find(tail)
    if len(tokens) <= MAX_CANDIDATES:
        assert (found.length if found else 0) == longest(tokens, tail, len(tokens) - 1)
    if found is not None:
        assert tokens[found.after - found.length : found.after] == tail[-found.length :]
        assert found.after < len(tokens)


@given(TEXTS, st.lists(st.integers(1, 20), max_size=6))
def test_appended_in_pieces_or_whole(tokens: list[int], cuts: list[int]) -> None:
    pieces, at = TextIndex(), 0
    for cut in [*cuts, len(tokens)]:
        pieces.extend(tokens[at : at + cut])
        at += cut
    whole = TextIndex(tokens)
    assert pieces.tokens == whole.tokens and pieces.find(tokens, is_own=True) == whole.find(tokens, is_own=True)


def test_the_latest_of_equal_matches_counts() -> None:
    index = TextIndex([1, 2, 3, 1, 2, 4, 1, 2])
    assert index.read(index.find(index.tokens, is_own=True).after, 1) == [4]  # type: ignore[union-attr]


def test_a_cycle_goes_on_and_a_text_ends() -> None:
    index = TextIndex([7, 8, 9, 7, 8, 9, 7, 8])
    match = index.find(index.tokens, is_own=True)
    assert match is not None and index.read(match.after, 7, is_own=True) == [9, 7, 8, 9, 7, 8, 9]
    other = TextIndex([1, 2, 3, END, 4, 5])
    match = other.find([1, 2])
    assert match is not None and other.read(match.after, 5) == [3]


def test_a_limit_on_what_is_compared() -> None:
    index = TextIndex([1, 2, 3, 4, 5, 9, 3, 4, 5, 8, 2, 3, 4, 5])
    far = index.find(index.tokens, is_own=True)
    near = index.find(index.tokens, is_own=True, max_match=2)
    assert far is not None and index.tokens[far.after] == 9 and far.length == 4
    assert near is not None and index.tokens[near.after] == 8 and near.length == 2
