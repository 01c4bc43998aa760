"""Encode server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

END = b"\n\n"  # ends an event, never inside one
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
MEDIA_TYPE = "text/event-stream"

TEXT = "\ue000text\ue000"  # stands for the text of a template; in a private area of Unicode
_encoder = msgspec.json.Encoder()
# Line breaks to some clients, but not in JSON.
_LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


class EventTemplate:
    """An event of which only one text changes."""

    def __init__(self, value: Any) -> None:
        """The text's place in `value` is `TEXT`."""
        self._before, self._after = event(value).rsplit(_encoder.encode(TEXT), 1)  # a client may write it before

    def fill(self, text: str) -> bytes:
        line = _encoder.encode(text)
        return b"%b%b%b" % (self._before, line if line.isascii() else _escape(line), self._after)


def _encode(value: Any) -> bytes:
    line = _encoder.encode(value)
    return line if line.isascii() else _escape(line)


def _escape(line: bytes) -> bytes:
    for end, escaped in _LINE_BREAKS.items():
        line = line.replace(end, escaped)
    return line
