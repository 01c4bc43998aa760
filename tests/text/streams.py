"""Streams for the tests: a text cut at given places, and events joined so that cuts do not show."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.text.answer_events import CallArguments, CallBegin, ReasoningDelta, TextDelta

places = st.lists(st.integers(0, 10_000), max_size=40)


def cut(text: str, where: list[int]) -> list[str]:
    marks = [0, *sorted(place % (len(text) + 1) for place in where), len(text)]
    return [text[begin:end] for begin, end in zip(marks, marks[1:])]


def joined(events: list) -> list[tuple]:
    """Plain tuples; neighbouring pieces of one text, or of one call's arguments, are one."""
    out: list[tuple] = []
    for event in events:
        if isinstance(event, CallBegin):
            out.append(("call", event.index, event.id, event.name))
            continue
        kind = {TextDelta: "text", ReasoningDelta: "reasoning", CallArguments: "arguments"}[type(event)]
        key = (kind, event.index) if kind == "arguments" else (kind,)
        assert event.text, "an event without text"
        if out and out[-1][:-1] == key:
            out[-1] = (*key, out[-1][-1] + event.text)
        else:
            out.append((*key, event.text))
    return out


def run(reader, pieces: list[str]) -> list[tuple]:
    return joined([event for piece in pieces for event in reader.push(piece)] + reader.finish())
