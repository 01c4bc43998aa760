"""Limit the memory of request bodies: who may read how much at once, and who waits."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.errors import Busy
from penstock.host.machine import held_collector

M_MMAP_THRESHOLD = -3  # from malloc.h
LARGE_BYTES = 1 << 20
_library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
SMALL_BYTES = 64 * 1024  # a body up to this is not counted, and is decoded on the event loop
MAX_LIGHT_BYTES = 1 << 20  # a body up to this may use the bytes set aside for light bodies
SHARED_PART = 4  # all bodies share this fraction of the largest body's size
MIN_SHARED_BYTES = 8 << 20
MAX_WAIT_S = 30.0
SLOW_S = 10.0  # max time for a body while others wait
TRICKLE_S = 2.0  # max time for its next TRICKLE_BYTES
TRICKLE_BYTES = 128 * 1024
PATIENCE_S = 0.5  # for memory held by a slow body
Made = TypeVar("Made")


def map_large_allocations() -> None:
    """Fix the mmap threshold: glibc raises it after the first large free and then keeps the memory."""
    if hasattr(_library, "mallopt"):
        _library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def trim_heap() -> None:
    """Return free memory to the system without blocking other threads."""
    if hasattr(_library, "malloc_trim"):
        _library.malloc_trim(0)


class BodyMemory:
    """Memory shared by large bodies, first come first served; the oldest may always grow, so that one makes progress.

    While others wait, a tenant gets at most half. Light bodies have bytes of their own, at most half of them per
    tenant.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._shared_bytes = min(max_body_bytes, max(MIN_SHARED_BYTES, max_body_bytes // SHARED_PART))
        self._light_bytes = self._shared_bytes // 2
        self._holders: dict[BodyReservation, None] = {}  # holders, oldest first
        self._waiting: dict[BodyReservation, tuple[int, float]] = {}  # bytes and start of the wait, oldest first
        self._changed = asyncio.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        map_large_allocations()

    def has_waiter(self, since_s: float) -> bool:
        """True if a body has waited for memory for more than `since_s` seconds."""
        first = next(iter(self._waiting.values()), None)
        return first is not None and time.monotonic() - first[1] > since_s

    async def run(self, work: Callable[[], Made]) -> Made:
        """Run `work` on a large body off the event loop, one body at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, run_without_gc, work)

    async def grow(self, reservation: BodyReservation, num_bytes: int) -> None:
        self._waiting[reservation] = num_bytes, time.monotonic()
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._take(reservation, num_bytes)), MAX_WAIT_S)
        except asyncio.TimeoutError:
            raise Busy(
                f"no memory for this body within "
                f"{MAX_WAIT_S:.0f} s, other large bodies are being read: try again, or send less at once",
                5,
                503,
            ) from None
        finally:
            self._waiting.pop(reservation, None)
            if self._waiting:  # they may take what was kept for this one
                await self._notify()

    def _take(self, reservation: BodyReservation, num_bytes: int) -> bool:
        """Take the memory at once if it fits."""
        is_light = self._fits_light(reservation, num_bytes)
        if not (is_light or self._is_oldest(reservation) or self._fits(reservation)):
            return False
        del self._waiting[reservation]
        self._holders[reservation] = None
        reservation.num_bytes, reservation.is_light = num_bytes, is_light
        return True

    def _is_oldest(self, reservation: BodyReservation) -> bool:
        return reservation is next(iter(self._holders or self._waiting))

    def _fits_light(self, reservation: BodyReservation, num_bytes: int) -> bool:
        others = [one for one in self._holders if one.is_light and one is not reservation]
        own = sum(one.num_bytes for one in others if one.tenant == reservation.tenant)
        return (
            num_bytes <= MAX_LIGHT_BYTES
            and own + num_bytes <= self._light_bytes // 2
            and sum(one.num_bytes for one in others) + num_bytes <= self._light_bytes
        )

    def _fits(self, reservation: BodyReservation) -> bool:
        """True if the memory suffices behind the holders and the earlier waiters."""
        held: dict[str, int] = {}
        for one in self._holders:
            if not (one.is_light or self._is_oldest(one)):
                held[one.tenant] = held.get(one.tenant, 0) + one.num_bytes
        for one, (num_bytes, _) in self._waiting.items():
            more = num_bytes - (0 if one.is_light else one.num_bytes)
            own = held.get(one.tenant, 0) + more
            contested = any(other.tenant != one.tenant for other in self._waiting)
            may = own <= (self._shared_bytes // 2 if contested else self._shared_bytes)
            if one is reservation:
                return may and sum(held.values()) + more <= self._shared_bytes
            if may:
                held[one.tenant] = own
        return False

    async def leave(self, reservation: BodyReservation) -> None:
        if self._holders.pop(reservation, reservation) is None:
            self._thread.submit(trim_heap)
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def run_without_gc(work: Callable[[], Made]) -> Made:
    """Run `work` with garbage collection off: it would dominate when 200,000 lists are created."""
    with held_collector():
        return work()


class BodyReservation:
    def __init__(self, memory: BodyMemory, tenant: str = "") -> None:
        self.memory = memory
        self.tenant = tenant
        self.num_bytes = 0
        self.is_light = False  # uses the light bodies' bytes
        self.begun_s = time.monotonic()
        self._mark_s, self._mark_bytes = self.begun_s, 0  # last progress

    async def hold(self, num_bytes: int) -> None:
        """Reserve `num_bytes`; grows by doubling."""
        if num_bytes >= self._mark_bytes + TRICKLE_BYTES:
            self._mark_s, self._mark_bytes = time.monotonic(), num_bytes
        if num_bytes > max(SMALL_BYTES, self.num_bytes):
            begin_s = time.monotonic()
            most = MAX_LIGHT_BYTES if num_bytes <= MAX_LIGHT_BYTES else self.memory.max_body_bytes
            await self.memory.grow(self, min(2 * num_bytes, most, self.memory.max_body_bytes))
            self._mark_s += time.monotonic() - begin_s  # waiting for us is not slowness

    @property
    def is_overdue(self) -> bool:
        """True if the body is too slow while others wait for memory."""
        if not self.num_bytes:
            return False
        now_s = time.monotonic()
        return (
            now_s - self._mark_s > TRICKLE_S
            and self.memory.has_waiter(PATIENCE_S)
            or now_s - self.begun_s > SLOW_S
            and self.memory.has_waiter(SLOW_S)
        )

    async def leave(self) -> None:
        await self.memory.leave(self)
