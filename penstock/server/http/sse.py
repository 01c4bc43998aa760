"""Encode server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

END = b"\n\n"  # ends an event, never inside one
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
MEDIA_TYPE = "text/event-stream"

_encoder = msgspec.json.Encoder()
# Line breaks to some clients, but not in JSON.
_LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


def _encode(value: Any) -> bytes:
    line = _encoder.encode(value)
    if not line.isascii():
        for end, escaped in _LINE_BREAKS.items():
            line = line.replace(end, escaped)
    return line
