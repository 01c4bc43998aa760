"""Room for request bodies: how many bytes of them are in memory at once, and who must wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.errors import Busy
from penstock.machine import held_collector
from penstock.server.memory import give_back, keep_large_apart

SMALL_BYTES = 64 * 1024         # a body up to this takes no room, and is read on the loop
SHARED_PART = 4                 # of the largest body, the part that all bodies share
MIN_SHARED_BYTES = 8 << 20
MAX_WAIT_S = 30.0
SLOW_S = 10.0                   # a body may take this long while others wait

Made = TypeVar("Made")


class BodyRoom:
    """All large bodies share some bytes; the oldest of them may take what it needs, so that one always gets on."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._shared_bytes = min(max_body_bytes, max(MIN_SHARED_BYTES, max_body_bytes // SHARED_PART))
        self._places: dict[Place, None] = {}        # those that hold room, oldest first
        self._waiting: dict[Place, float] = {}      # since when
        self._changed = asyncio.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        keep_large_apart()

    @property
    def is_wanted(self) -> bool:
        """Somebody has waited long for room."""
        return any(time.monotonic() - since > SLOW_S for since in self._waiting.values())

    async def run(self, work: Callable[[], Made]) -> Made:
        """Do work on a large body off the loop; one body at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _undisturbed, work)

    async def grow(self, place: Place, num_bytes: int) -> None:
        """Wait until the place may have `num_bytes`."""
        self._waiting[place] = time.monotonic()
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._fits(place, num_bytes)), MAX_WAIT_S)
        except asyncio.TimeoutError:
            raise Busy(f"other large bodies are being read, and there was no room for this one within "
                       f"{MAX_WAIT_S:.0f} s: try again, or send less at once", 5, 503) from None
        finally:
            del self._waiting[place]
        self._places[place] = None
        place.num_bytes = num_bytes

    def _fits(self, place: Place, num_bytes: int) -> bool:
        others = sum(one.num_bytes for one in self._places if one is not place)
        oldest = next(iter(self._places or self._waiting))
        return others + num_bytes <= self._shared_bytes or place is oldest

    async def leave(self, place: Place) -> None:
        if self._places.pop(place, place) is None:
            self._thread.submit(give_back)
            async with self._changed:
                self._changed.notify_all()


def _undisturbed(work: Callable[[], Made]) -> Made:
    """Where 200,000 lists come into being, looking for cyclic garbage takes most of the time."""
    with held_collector():
        return work()


class Place:
    """One body's part of the room."""

    def __init__(self, room: BodyRoom) -> None:
        self.room = room
        self.num_bytes = 0
        self.begun_s = time.monotonic()

    async def hold(self, num_bytes: int) -> None:
        """Hold room for so many bytes; it grows by doubling."""
        if num_bytes > max(SMALL_BYTES, self.num_bytes):
            await self.room.grow(self, min(2 * num_bytes, self.room.max_body_bytes))

    @property
    def is_overdue(self) -> bool:
        return self.num_bytes > 0 and time.monotonic() - self.begun_s > SLOW_S and self.room.is_wanted

    async def leave(self) -> None:
        await self.room.leave(self)
