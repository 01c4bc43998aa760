"""A request on its way: what was asked, what has been said so far, and who listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from penstock.answers import Collector
from penstock.errors import InvalidRequest, PenstockError
from penstock.text.tokenizer import Tokenizer
from penstock.types import Delta, Request, StreamDelta


class Flight:
    """Kept by the API process from admission to the last token, so that no engine's death loses a word of it."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, *, tenant: str = "",
                 deadline_s: float | None = None) -> None:
        self.request = request
        self.tenant = tenant
        self.deadline_s = deadline_s                # by time.monotonic()
        self.collector = Collector(request, prompt, tokenizer)
        self.collector.listener = self._push
        self.outputs: dict[int, list[int]] = {sibling: [] for sibling in range(request.num_siblings)}
        self.num_deaths = 0                         # of engines that had it
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
        self.outputs[delta.sibling] += delta.tokens
        ends_here = self.collector.push(delta)
        if ends_here or delta.finish_reason is not None:
            del self.outputs[delta.sibling]
        if delta.error is not None:
            self.fail(InvalidRequest(delta.error) if delta.unfit else
                      PenstockError(f"the model failed on this request: {delta.error}"))
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
