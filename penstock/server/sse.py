"""Server-sent events as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
MEDIA_TYPE = "text/event-stream"

_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"
