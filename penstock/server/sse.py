"""Server-sent events as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

END = b"\n\n"  # of an event, and in none
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
MEDIA_TYPE = "text/event-stream"

_encoder = msgspec.json.Encoder()
# Line ends to some clients, though not to JSON.
_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


def event(value: Any) -> bytes:
    return b"data: " + _line(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _line(value) + b"\n\n"


def _line(value: Any) -> bytes:
    line = _encoder.encode(value)
    if not line.isascii():
        for end, escaped in _ENDS.items():
            line = line.replace(end, escaped)
    return line
