"""Write what a step adds to streams to their connections at once, past the tasks that wait for the streams' ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import EngineFailed, PenstockError
from penstock.types import StreamDelta

MAX_EVENTS = 512  # written apart in one turn; with more waiting, those of a stream are joined
log = logging.getLogger("penstock.engine")
Encode = Callable[[list[StreamDelta], bool], bytes]  # the second: True to join deltas into one event


class OpenBody(Protocol):
    """A response whose start is sent."""

    @property
    def has_begun(self) -> bool:
        """True if its start is sent, and its end is not."""

    @property
    def is_ready(self) -> bool:
        """True if the client reads fast enough to be sent more."""

    @property
    def is_held_up(self) -> bool:
        """True if the client has to read before more can be sent."""

    def write(self, data: bytes) -> None: ...


class DirectWriter:
    """Encodes and writes the deltas of one client request."""

    def __init__(
        self,
        body: OpenBody,
        encode: Encode,
        record: Callable[[Sequence[StreamDelta], float], None],
        fail: Callable[[PenstockError], None],
        unwritten: UnwrittenDeltas,
    ) -> None:
        self.body = body
        self._encode, self._record, self._fail, self._unwritten = encode, record, fail, unwritten
        self._deltas: list[StreamDelta] = []

    def take(self, delta: StreamDelta) -> bool:
        """Take a delta for the next flush; False if the client does not read, or if it needs more than writing."""
        has_more = delta.finish_reason is not None or delta.prompt_logprobs is not None or delta.forced_closing
        if has_more or not self.body.is_ready:
            return False
        self.add(delta)
        return True

    def add(self, delta: StreamDelta) -> None:
        if not self._deltas:
            self._unwritten.writers.append(self)
        self._deltas.append(delta)
        self._unwritten.num_deltas += 1

    def flush(self, now_s: float, join: bool = False) -> None:
        deltas, self._deltas = self._deltas, []
        if not deltas:
            return
        try:
            self._record(deltas, now_s)
            data = self._encode(deltas, join)
            if data:
                self.body.write(data)
        except Exception as error:
            log.exception("cannot write an output")
            self._fail(EngineFailed(f"cannot write the output ({type(error).__name__}): see the server's log"))


class UnwrittenDeltas:
    """Deltas taken since the last flush."""

    def __init__(self) -> None:
        self.writers: list[DirectWriter] = []
        self.num_deltas = 0

    def flush(self) -> None:
        """Write them all. Where the server has fallen behind, each stream gets one event for all its deltas."""
        if not self.writers:
            return
        writers, self.writers = self.writers, []
        join, self.num_deltas = self.num_deltas > MAX_EVENTS, 0
        now_s = time.monotonic()
        for writer in writers:
            writer.flush(now_s, join)


def join_deltas(deltas: Sequence[StreamDelta]) -> list[StreamDelta]:
    """Join the deltas of each answer into one; none may end its answer."""
    by_index: dict[int, list[StreamDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [_join(some) if len(some) > 1 else some[0] for some in by_index.values()]


def _join(deltas: Sequence[StreamDelta]) -> StreamDelta:
    first, last = deltas[0], deltas[-1]
    return StreamDelta(
        first.request_id,
        first.index,
        "".join([delta.text for delta in deltas]),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(position for delta in deltas for position in delta.logprobs),
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
    )
