"""A journal of what became of requests inside the engine: a few marks each, never one per token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from penstock.engine.sequence import Sequence

MAX_MARKS = 10_000  # not yet taken; later ones are lost

Kind = Literal["prepared", "fetched", "run", "chunk", "preempt"]


class Mark(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Something that happened to one sibling, at a time of the monotonic clock, which processes of a machine share."""

    request_id: str
    sibling: int
    kind: Kind
    at_s: float
    start: int = 0  # run: positions found in the cache; chunk: its first position
    # chunk: its positions; run: those restored from the store; prepared, fetched: microseconds of it
    count: int = 0
    total: int = 0  # chunk: positions that are known; fetched: blocks
    others: int = 0  # chunk: rows in the step before it
    why: str = ""  # run: it waited for this; preempt: the reason
    tenant: str = ""  # preempt: whose request got the blocks


class RequestJournal:
    """Collects marks once it is opened; closed, a mark costs one test."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_open = False
        self.blocked_by = ""  # why the first waiting sequence was not admitted the last time
        self.num_blocked = 0  # times that any was not
        self._clock = clock
        self._marks: list[Mark] = []

    def take(self) -> list[Mark]:
        """Return the marks since the last call."""
        marks, self._marks = self._marks, []
        return marks

    def block(self, why: str) -> None:
        """Note why the first waiting sequence is not admitted now."""
        self.blocked_by = why
        self.num_blocked += 1

    def run(self, sequence: Sequence, hit: int) -> None:
        if self.is_open:
            waited = self.num_blocked > sequence.num_blocked
            restored = sequence.held.num_restored
            self._add(sequence, "run", start=hit, count=restored, why=self.blocked_by if waited else "")

    def wait(self, sequence: Sequence) -> None:
        """Note that a sequence begins to wait."""
        sequence.num_blocked = self.num_blocked

    def chunk(self, sequence: Sequence, start: int, count: int, others: int) -> None:
        if self.is_open:
            self._add(sequence, "chunk", start=start, count=count, total=len(sequence.tokens), others=others)

    def preempt(self, sequence: Sequence, why: str, tenant: str = "") -> None:
        if self.is_open:
            self._add(sequence, "preempt", why=why, tenant=tenant)

    def prepare(self, request_id: str, seconds: float) -> None:
        """Note that a request's grammar is ready, after so long in its compiler."""
        self._marks.append(Mark(request_id, 0, "prepared", self._clock(), count=int(seconds * 1e6)))

    def fetch(self, request_id: str, num_blocks: int, seconds: float) -> None:
        """Note that so many blocks of a request's prompt came from another server, in so long."""
        mark = Mark(request_id, 0, "fetched", self._clock(), count=int(seconds * 1e6), total=num_blocks)
        self._marks.append(mark)

    def _add(
        self,
        sequence: Sequence,
        kind: Kind,
        *,
        start: int = 0,
        count: int = 0,
        total: int = 0,
        others: int = 0,
        why: str = "",
        tenant: str = "",
    ) -> None:
        if len(self._marks) < MAX_MARKS:
            id, sibling = sequence.request.id, sequence.sibling
            self._marks.append(Mark(id, sibling, kind, self._clock(), start, count, total, others, why, tenant))
