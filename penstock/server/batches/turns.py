"""How many lines of all batches together are asked at once."""

from __future__ import annotations

import asyncio

FIRST_TURNS = 1  # before a model is loaded


class Turns:
    """Whoever asks first is first; the limit may grow. Whole inputs are gone through one at a time (`checking`)."""

    def __init__(self, limit: int = FIRST_TURNS) -> None:
        self.limit = limit
        self.checking = asyncio.Lock()
        self._free = asyncio.Semaphore(limit)

    def grow(self, limit: int) -> None:
        for _ in range(limit - self.limit):
            self._free.release()
        self.limit = max(self.limit, limit)

    async def __aenter__(self) -> None:
        await self._free.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._free.release()
