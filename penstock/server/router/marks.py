"""Follow a stream by its marks: what the client has of it, and what is held back until its mark comes."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.server.http.relay import MARK, Handover, ShownPart
from penstock.server.router.http_client import UpstreamFailed

MAX_HELD_BYTES = 32 << 20
MAX_SHOWN_BYTES = 16 << 20  # tokens and log probabilities that would be sent to another server
Value = TypeVar("Value")
_decoder = msgspec.json.Decoder(list[ShownPart] | None)


class MarkedStream:
    """Cuts marks out of a stream. `has_moved` is True once its server asks to go on elsewhere."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], ShownPart] = {}
        self.has_begun = self.has_moved = False
        self._held = bytearray()  # events without their mark
        self._line = bytearray()  # the last one, incomplete
        self._num_shown_bytes = 0

    def restart(self) -> None:
        """Drop what was held: its server is lost."""
        self._held.clear()
        self._line.clear()
        self.has_moved = False

    def push(self, data: bytes) -> bytes:
        """Add bytes; return the events that are complete."""
        shown = bytearray()
        *lines, rest = (bytes(self._line) + data).split(b"\n") if self._line else data.split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            if line.startswith(MARK):
                self._take(line[len(MARK) :])
                if self.has_moved:
                    return bytes(shown)
                shown += self._held
                self._held.clear()
            else:
                self._held += line + b"\n"
        if len(self._held) + len(self._line) > MAX_HELD_BYTES:
            raise UpstreamFailed(f"its stream has more than {MAX_HELD_BYTES} bytes without a mark")
        return bytes(shown)

    def finish(self) -> bytes:
        """Return what is left at the stream's proper end."""
        return bytes(self._held + self._line)

    def _take(self, mark: bytes) -> None:
        try:
            parts = _decoder.decode(mark)
        except msgspec.DecodeError:
            raise UpstreamFailed("a mark of its stream cannot be read") from None
        if parts is None:
            self.has_moved = True
            return
        self.has_begun = True
        self._num_shown_bytes += len(mark)
        for part in parts:
            before = self.parts.get((part.number, part.sibling))
            if before is not None:
                part = msgspec.structs.replace(
                    part,
                    tokens=_extend(before.tokens, part.tokens),
                    logprobs=_extend(before.logprobs, part.logprobs),
                    forced_closing=before.forced_closing or part.forced_closing,
                )
            self.parts[part.number, part.sibling] = part

    @property
    def can_resume(self) -> bool:
        return self._num_shown_bytes <= MAX_SHOWN_BYTES

    def resume(self, kind: str) -> bytes:
        """Encode what the client has; empty if it has nothing."""
        return msgspec.json.encode(Handover(kind, list(self.parts.values()))) if self.has_begun else b""


def _extend(values: list[Value], more: list[Value]) -> list[Value]:
    values.extend(more)
    return values
