"""Stop strings against a scan of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.answers import StopStrings

letters = st.text(alphabet="ab\n", max_size=30)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=5)


def scan(text: str, strings: list[str], include: bool) -> tuple[str, str | None]:
    """Read on until some stop string is complete; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in zip(marks, marks[1:])]


@given(letters, stops, st.lists(st.integers(0, 99), max_size=12), st.booleans())
def test_equals_a_scan_of_the_whole_text_however_it_is_cut(text, strings, places, include):
    stop = StopStrings(strings, include)
    shown = "".join(stop.push(delta) for delta in cut(text, places)) + stop.finish()
    assert (shown, stop.matched) == scan(text, strings, include)


@given(letters, stops)
def test_holds_back_only_what_a_stop_string_may_begin_with(text, strings):
    stop, shown = StopStrings(strings), ""
    for end, char in enumerate(text, 1):
        shown += stop.push(char)
        if stop.matched:
            return
        held = max(
            (size for string in strings for size in range(len(string)) if text[:end].endswith(string[:size])), default=0
        )
        assert shown == text[: end - held]


@pytest.mark.parametrize(
    "strings, shown, matched",
    [
        (["\n", "\n\n"], "one", "\n"),  # a shorter string is not kept waiting for a longer one
        (["e\n\ntwo", "\n\n"], "one", "\n\n"),  # complete first, though it begins later
        (["\n\n", "e\n\n"], "on", "e\n\n"),  # complete together: the longest
        (["three"], "one\n\ntwo", None),
    ],
)
def test_which_stop_string_ends_the_text(strings, shown, matched):
    stop = StopStrings(strings)
    assert stop.push("one\n\ntwo") + stop.finish() == shown
    assert stop.matched == matched


def test_nothing_follows_a_match():
    stop = StopStrings(["x"], include=True)
    assert [stop.push("ax"), stop.push("bxb"), stop.finish()] == ["ax", "", ""]


def test_a_string_completed_before_min_tokens_is_passed_over():
    stop = StopStrings(["END"])
    assert stop.push("a END b EN", watch=False) == "a END b "
    assert stop.push("D c") == ""
    assert stop.matched == "END"
