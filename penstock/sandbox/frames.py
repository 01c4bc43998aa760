"""Messages on a stream socket: a length, then msgpack."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

HEADER = struct.Struct("<I?")  # body bytes; True if the sender ends after it
MAX_BYTES = (1 << 32) - 1
_encoder = msgspec.msgpack.Encoder()


class Closed(ConnectionError):
    """The other end is gone."""


def pack(message: Any, last: bool = False) -> bytearray:
    """Return a message with its header; large ones are not copied."""
    frame = bytearray(HEADER.size)
    _encoder.encode_into(message, frame, HEADER.size)
    size = len(frame) - HEADER.size
    if size > MAX_BYTES:
        raise ValueError(f"a message of {size} bytes exceeds the limit of {MAX_BYTES}")
    HEADER.pack_into(frame, 0, size, last)
    return frame


def receive(sock: socket.socket) -> tuple[bytes, bool]:
    """Return the next message's body, and True if it is the last."""
    size, last = HEADER.unpack(_exactly(sock, HEADER.size))
    return _exactly(sock, size), last


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise Closed("the process at the other end has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
