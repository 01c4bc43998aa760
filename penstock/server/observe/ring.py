"""The timelines of running and recent requests, by id."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from penstock.server.observe.trace import Trace

MAX_ENDED = 2_000


class TraceRing:
    """Keeps running requests, and the last ones that ended."""

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._max_ended = max_ended
        self._running: dict[Trace, None] = {}
        self._ended: OrderedDict[Trace, None] = OrderedDict()
        self._by_id: dict[str, dict[Trace, None]] = {}

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def enter(self, trace: Trace) -> None:
        """Keep a request from now on; its ids may be known later (`name`)."""
        self._running[trace] = None
        self._by_id.setdefault(trace.id, {})[trace] = None

    def name(self, trace: Trace, answer_id: str) -> None:
        """Give a request the id of its response."""
        trace.answer_id = answer_id
        if trace in self._running:
            self._by_id.setdefault(answer_id, {})[trace] = None

    def end(self, trace: Trace) -> None:
        if trace in self._running:
            del self._running[trace]
            self._ended[trace] = None
            while len(self._ended) > self._max_ended:
                self._forget(self._ended.popitem(last=False)[0])

    def _forget(self, trace: Trace) -> None:
        for id in {trace.id, trace.answer_id}:
            named = self._by_id.get(id, {})
            named.pop(trace, None)
            if not named:
                self._by_id.pop(id, None)

    def list_ended(self, limit: int) -> list[Trace]:
        """List the requests that ended, the last one first."""
        return list(itertools.islice(reversed(self._ended), limit))

    def find(self, id: str, tenant: str | None) -> Trace | None:
        """Return the latest request of this id, of one tenant alone unless that is None."""
        for trace in reversed(self._by_id.get(id, {})):
            if tenant is None or trace.tenant == tenant:
                return trace
        return None
