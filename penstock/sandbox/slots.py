"""Turns at something scarce, fair among tenants: of those who wait, each tenant's first goes in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.errors import Busy


class Slots:
    def __init__(self, count: int, max_waiting: int, what: str) -> None:
        self._free = count
        self._max_waiting, self._what = max_waiting, what
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self, tenant: str = "") -> AsyncIterator[None]:
        await self._acquire(tenant)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, tenant: str) -> None:
        if self._free and not self._num_waiting:
            self._free -= 1
            return
        if self._num_waiting >= self._max_waiting:
            raise Busy(f"{self._num_waiting} {self._what} wait already: try again in a while", 5)
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        self._num_waiting += 1
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._release()  # the turn came and nobody takes it
            else:
                self._leave(tenant, mine)
            raise

    def _leave(self, tenant: str, mine: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and mine in queue:
            queue.remove(mine)
            self._taken_out(tenant, queue)

    def _release(self) -> None:
        """Give the turn to the next who still waits. One that is cancelled may not have left the queue yet."""
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            first = queue.popleft()
            self._waiting.move_to_end(tenant)
            self._taken_out(tenant, queue)
            if not first.done():
                return first.set_result(None)
        self._free += 1

    def _taken_out(self, tenant: str, queue: deque[asyncio.Future[None]]) -> None:
        self._num_waiting -= 1
        if not queue:
            del self._waiting[tenant]
