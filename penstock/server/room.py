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

SMALL_BYTES = 64 * 1024  # a body up to this takes no room, and is read on the loop
MAX_LIGHT_BYTES = 1 << 20  # a body up to this may take of the bytes set aside
SHARED_PART = 4  # of the largest body, the part that all bodies share
MIN_SHARED_BYTES = 8 << 20
MAX_WAIT_S = 30.0
SLOW_S = 10.0  # a body may take this long while others wait
TRICKLE_S = 2.0  # and this long for its next TRICKLE_BYTES
TRICKLE_BYTES = 128 * 1024
PATIENCE_S = 0.5  # for room that a trickling body holds

Made = TypeVar("Made")


class BodyRoom:
    """All large bodies share some bytes; the oldest of them may take what it needs, so that one always gets on.

    Whoever came first is served first. While others wait, a tenant gets no more than half of what is shared. Light
    bodies have some bytes of their own, of which a tenant never has more than half.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._shared_bytes = min(max_body_bytes, max(MIN_SHARED_BYTES, max_body_bytes // SHARED_PART))
        self._apart_bytes = self._shared_bytes // 2
        self._places: dict[Place, None] = {}  # those that hold room, oldest first
        self._waiting: dict[Place, Wait] = {}  # first come first
        self._changed = asyncio.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        keep_large_apart()

    def is_wanted(self, since_s: float) -> bool:
        """Somebody has waited so long for room."""
        first = next(iter(self._waiting.values()), None)
        return first is not None and time.monotonic() - first.begun_s > since_s

    async def run(self, work: Callable[[], Made]) -> Made:
        """Do work on a large body off the loop; one body at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, undisturbed, work)

    async def grow(self, place: Place, num_bytes: int) -> None:
        """Wait until the place may have `num_bytes`."""
        self._waiting[place] = Wait(num_bytes)
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._take(place, num_bytes)), MAX_WAIT_S)
        except asyncio.TimeoutError:
            raise Busy(
                f"other large bodies are being read, and there was no room for this one within "
                f"{MAX_WAIT_S:.0f} s: try again, or send less at once",
                5,
                503,
            ) from None
        finally:
            self._waiting.pop(place, None)
            if self._waiting:  # they may have what was kept for this one
                await self._tell()

    def _take(self, place: Place, num_bytes: int) -> bool:
        """Take the room at once if there is some, so that nobody else does."""
        is_light = self._fits_apart(place, num_bytes)
        if not (is_light or self._is_oldest(place) or self._fits(place)):
            return False
        del self._waiting[place]
        self._places[place] = None
        place.num_bytes, place.is_apart = num_bytes, is_light
        return True

    def _is_oldest(self, place: Place) -> bool:
        return place is next(iter(self._places or self._waiting))

    def _fits_apart(self, place: Place, num_bytes: int) -> bool:
        others = [one for one in self._places if one.is_apart and one is not place]
        own = sum(one.num_bytes for one in others if one.tenant == place.tenant)
        return (
            num_bytes <= MAX_LIGHT_BYTES
            and own + num_bytes <= self._apart_bytes // 2
            and sum(one.num_bytes for one in others) + num_bytes <= self._apart_bytes
        )

    def _fits(self, place: Place) -> bool:
        """Room is left for the place behind what is held and what those before it wait for."""
        held: dict[str, int] = {}
        for one in self._places:
            if not (one.is_apart or self._is_oldest(one)):
                held[one.tenant] = held.get(one.tenant, 0) + one.num_bytes
        for one, wait in self._waiting.items():
            more = wait.num_bytes - (0 if one.is_apart else one.num_bytes)
            own = held.get(one.tenant, 0) + more
            contested = any(other.tenant != one.tenant for other in self._waiting)
            may = own <= (self._shared_bytes // 2 if contested else self._shared_bytes)
            if one is place:
                return may and sum(held.values()) + more <= self._shared_bytes
            if may:
                held[one.tenant] = own
        return False

    async def leave(self, place: Place) -> None:
        if self._places.pop(place, place) is None:
            self._thread.submit(give_back)
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Wait:
    """Since when a place waits, and for how many bytes in all."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.begun_s = time.monotonic()


def undisturbed(work: Callable[[], Made]) -> Made:
    """Where 200,000 lists come into being, looking for cyclic garbage takes most of the time."""
    with held_collector():
        return work()


class Place:
    """One body's part of the room."""

    def __init__(self, room: BodyRoom, tenant: str = "") -> None:
        self.room = room
        self.tenant = tenant
        self.num_bytes = 0
        self.is_apart = False  # in the bytes set aside for light bodies
        self.begun_s = time.monotonic()
        self._mark_s, self._mark_bytes = self.begun_s, 0  # of its last progress

    async def hold(self, num_bytes: int) -> None:
        """Hold room for so many bytes; it grows by doubling."""
        if num_bytes >= self._mark_bytes + TRICKLE_BYTES:
            self._mark_s, self._mark_bytes = time.monotonic(), num_bytes
        if num_bytes > max(SMALL_BYTES, self.num_bytes):
            begin_s = time.monotonic()
            most = MAX_LIGHT_BYTES if num_bytes <= MAX_LIGHT_BYTES else self.room.max_body_bytes
            await self.room.grow(self, min(2 * num_bytes, most, self.room.max_body_bytes))
            self._mark_s += time.monotonic() - begin_s  # it could not get on

    @property
    def is_overdue(self) -> bool:
        """It took too long, or hardly gets on, while others wait for room."""
        if not self.num_bytes:
            return False
        now_s = time.monotonic()
        return (
            now_s - self._mark_s > TRICKLE_S
            and self.room.is_wanted(PATIENCE_S)
            or now_s - self.begun_s > SLOW_S
            and self.room.is_wanted(SLOW_S)
        )

    async def leave(self) -> None:
        await self.room.leave(self)
