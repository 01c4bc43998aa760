"""Events that every client reads alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.server.http import sse


@pytest.mark.parametrize("text", ["a\x85b", "a\u2028b", "\u2029", "a\nb\r\x0b\x0c\x1c\x1d\x1eb", "ä\u2027\u202a\x84é"])
def test_an_event_is_one_line_to_whoever_splits_it(text: str) -> None:
    for body in (sse.event({"t": text}), sse.named_event("n", {"t": text})):
        data = [line for line in body.decode().splitlines() if line.startswith("data: ")]
        assert len(body.decode().splitlines()) == body.count(b"\n") and json.loads(data[0][6:]) == {"t": text}


@pytest.mark.parametrize("text", ["", "plain", 'a "quote"\n', "\u2028\x85", sse.TEXT, "\U0001f600"])
@pytest.mark.parametrize("id", ["cmpl-1", sse.TEXT])
def test_a_template_gives_the_event_itself(text: str, id: str) -> None:
    """Whatever the text, and whatever a client calls its request."""

    def chunk(text: str) -> dict[str, Any]:
        return {"id": id, "choices": [{"index": 0, "text": text, "finish_reason": None}]}

    assert sse.EventTemplate(chunk(sse.TEXT)).fill(text) == sse.event(chunk(text))
