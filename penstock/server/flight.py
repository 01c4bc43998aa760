"""A request on its way: what was asked, what has been said so far, and who listens."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

from penstock.answers import Collector
from penstock.errors import InvalidRequest, PenstockError
from penstock.server.line import Line
from penstock.text.tokenizer import Tokenizer
from penstock.types import Delta, Request, StreamDelta

_NOTHING: list[int] = []  # never changed
STARTED_COST = 8  # of taking a part back that has made tokens; 1 before


class Part:
    """Some siblings of a flight, which are one request to the engine. It outlives engines; `id` does not: it is another
    each time the part is begun."""

    def __init__(self, flight: Flight, siblings: Iterable[int]) -> None:
        self.flight = flight
        self.siblings = set(siblings)  # those that go on
        self.id = ""
        self.num_tokens = 0  # since it was begun
        self.num_deaths = 0  # of engines that had it, one after another without much progress
        self.num_trials_lost = 0  # deaths of engines while it alone was on trial
        self.num_strikes = 0  # such deaths before its first token, one after another
        self.max_group = 1 << 30  # how many others may be on trial with it
        self.trial_s = 0.0  # how long a trial lasts that shows nothing; 0: not tried yet
        self.recall_cost = 0  # of the times it had to make way
        self._first, self._num_begun = min(self.siblings), 0

    def split(self, size: int) -> Part | None:
        """Keep so many siblings; the others are a part of their own."""
        if len(self.siblings) <= size:
            return None
        rest = sorted(self.siblings)[size:]
        self.siblings.difference_update(rest)
        return Part(self.flight, rest)

    def begin(self) -> Request:
        """What the engine is sent."""
        request = self.flight.request
        whole = self._num_begun == 0 and len(self.siblings) == request.num_siblings
        self.id = request.id if whole else f"{request.id}.{self._first}.{self._num_begun}"
        self._num_begun += 1
        self.num_tokens = 0
        return request if whole else replace(request, id=self.id)

    def note_recall(self) -> None:
        """It made way for another."""
        self.recall_cost += STARTED_COST if self.num_tokens else 1

    @property
    def outputs(self) -> dict[int, list[int]] | None:
        """The siblings that go on and their tokens so far; None for all of them, not begun."""
        outputs = {sibling: self.flight.outputs[sibling] for sibling in sorted(self.siblings)}
        return outputs if len(outputs) < self.flight.request.num_siblings or any(outputs.values()) else None


class Flight:
    """Kept by the API process from admission to the last token, so that no engine's death loses a word of it."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        *,
        tenant: str = "",
        deadline_s: float | None = None,
    ) -> None:
        self.request = request
        self.tenant = tenant
        self.deadline_s = deadline_s  # by time.monotonic()
        self.collector = Collector(request, prompt, tokenizer)
        self.collector.listener = self._push
        self.collector.adds_prompt_texts = False
        self.outputs = dict.fromkeys(range(request.num_siblings), _NOTHING)  # of the siblings that go on
        self.mus: dict[int, float] = {}  # mirostat's after those
        self.parts = deque([Part(self, range(request.num_siblings))])  # that wait
        self.line: Line | None = None
        self.prefix_keys: tuple[int, ...] | None = None  # of its prompt's blocks, once they are compared
        self.is_charged = False  # for its prompt
        self.begun_s = time.monotonic()
        self._items: asyncio.Queue[StreamDelta | PenstockError | None] = asyncio.Queue()
        self._num_cached: int | None = None

    @property
    def open(self) -> bool:
        return bool(self.outputs)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were in the cache when it was first computed."""
        return self._num_cached or 0

    @property
    def timeout_s(self) -> float:
        return (self.deadline_s or self.begun_s) - self.begun_s

    def take(self, delta: Delta) -> bool:
        """What a step added; whether the engine must end this sibling itself."""
        if delta.sibling not in self.outputs:
            return False
        if self._num_cached is None:
            self._num_cached = delta.num_cached_tokens
        elif delta.num_cached_tokens != self._num_cached:
            delta = replace(delta, num_cached_tokens=self._num_cached)
        said = self.outputs[delta.sibling]
        if said:
            said += delta.tokens
        else:
            self.outputs[delta.sibling] = list(delta.tokens)
        if delta.mu is not None:
            self.mus[delta.sibling] = delta.mu
        ends_here = self.collector.push(delta)
        if ends_here or delta.finish_reason is not None:
            del self.outputs[delta.sibling]
        if delta.error is not None:
            self.fail(
                InvalidRequest(delta.error)
                if delta.unfit
                else PenstockError(f"the model failed on this request: {delta.error}")
            )
        elif self.request.pool and not self.outputs:
            self._items.put_nowait(None)
        return ends_here

    def _push(self, item: StreamDelta) -> None:
        if not self.request.pool:
            self._items.put_nowait(item)

    def fail(self, error: PenstockError) -> None:
        self.outputs.clear()
        self._items.put_nowait(error)

    async def items(self) -> AsyncIterator[list[StreamDelta]]:
        """What came since the last time, until every answer has ended."""
        num_open = self.request.num_siblings
        while num_open:
            batch = [await self._items.get()]
            while not self._items.empty():
                batch.append(self._items.get_nowait())
            ready: list[StreamDelta] = []
            for item in batch:
                if isinstance(item, PenstockError):
                    if ready:
                        yield ready
                    raise item
                if item is None:
                    return
                ready.append(item)
                num_open -= item.finish_reason is not None
            if ready:
                yield ready
