"""Adapters: which are in memory, which hold the slots that rows name, and who has to wait for one.

A slot has the adapters of a request, summed; sequences with the same ones share it. A slot whose sequences have ended
keeps its adapters until another set needs it. Pure, as all of the scheduler: an executor reads the files.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from penstock.engine.executor import Answer, Awaited, Done, DropLora, LoadLora
from penstock.errors import InvalidRequest
from penstock.types import LoraUse

MAX_LOADING = 2  # at once
DRAINING_SHARE = 4  # at most one slot in four runs empty for those who wait
NO_LORAS = "LoRA is off: start with --enable-lora (enable_lora=True)"

Tell = Callable[[object], Awaited[Answer]]


@dataclass
class Slot:
    """`num_users` running sequences have these adapters."""

    number: int
    key: str = ""
    loras: tuple[LoraUse, ...] = ()
    num_users: int = 0
    used: int = 0  # when it was last taken

    def has(self, number: int) -> bool:
        return any(use.number == number for use in self.loras)


class LoraMemory:
    """Adapters that are known, in memory or being read; all others are on disk. At most `num_resident` are in memory,
    or if that is None as many as fit in `max_bytes`."""

    def __init__(self, num_resident: int | None, max_bytes: int = 0) -> None:
        self.num_resident, self.max_bytes = num_resident, max_bytes
        self.num_loads = self.num_evictions = 0
        self.loading: dict[int, Awaited[Answer]] = {}
        self.tell: Tell | None = None  # an executor's `control`
        self.sum_rank: int | None = None  # that the ranks of a set may add up to; None: any
        self._known: dict[int, LoadLora] = {}
        self._num_bytes: dict[int, int] = {}  # of adapters that were read
        self._resident: OrderedDict[int, None] = OrderedDict()  # the least recently used one first

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, number: int) -> bool:
        return number in self._resident

    def knows(self, number: int) -> bool:
        return number in self._known

    def load(self, message: LoadLora) -> Awaited[Answer]:
        """Make an adapter known. One whose fingerprint is given was read before, and is read again when needed."""
        self._known[message.number] = message
        return Done(Answer()) if message.fingerprint else self.fetch(message.number)

    def fetch(self, number: int) -> Awaited[Answer]:
        """Begin to read an adapter."""
        assert self.tell is not None
        self.num_loads += 1
        self.loading[number] = ticket = self.tell(self._known[number])
        return ticket

    def touch(self, number: int) -> None:
        self._resident.move_to_end(number)

    def has_room(self, number: int) -> bool:
        if self.num_resident is not None:
            return len(self._resident) + len(self.loading) < self.num_resident
        return sum(map(self._estimate, (*self._resident, *self.loading, number))) <= self.max_bytes

    @property
    def is_over(self) -> bool:
        """True if more is in memory than may be."""
        if self.num_resident is not None:
            return len(self._resident) > self.num_resident
        return sum(map(self._estimate, self._resident)) > self.max_bytes

    def _estimate(self, number: int) -> int:
        """Return an adapter's bytes; of one that was never read, those of the largest."""
        known = self._num_bytes.get(number)
        return max(self._num_bytes.values(), default=0) if known is None else known

    def poll(self) -> dict[int, str]:
        """Take in what has been read; returns why some adapters could not be."""
        failed = {}
        for number in [number for number, ticket in self.loading.items() if ticket.is_done]:
            answer, known = self.loading.pop(number).result(), self._known[number]
            if answer.error is None:
                seen, rank = str(answer.values.get("fingerprint", "")), int(answer.values.get("rank", 0))
                self._known[number] = replace(known, fingerprint=seen, rank=rank)
                self._num_bytes[number] = int(answer.values.get("num_bytes", 0))
                self._resident[number] = None
                continue
            failed[number] = answer.error
            if not known.fingerprint:
                del self._known[number]
        return failed

    def find_excess(self, loras: Sequence[LoraUse]) -> str:
        """Say why a slot has no room for a sum of adapters, as far as they have been read; empty if it has."""
        total = sum(self._known[use.number].rank for use in loras if use.number in self._known)
        if len(loras) < 2 or self.sum_rank is None or total <= self.sum_rank:
            return ""
        return (
            f"the ranks of {len(loras)} adapters in one request add up to {total}, over the {self.sum_rank} that a "
            f"slot on a GPU has room for: raise --max-lora-rank to {total}, or name fewer"
        )

    def describe(self, key: str) -> str | None:
        """Name a root's adapters by what their files hold; None if that is not known."""
        found = []
        for number, _, scale in (part.partition("*") for part in key.split("+")):
            known = self._known.get(int(number))
            if known is None or not known.fingerprint:
                return None
            found.append((known.fingerprint, scale))
        return repr(found)

    def find_idle(self, pinned: Container[int]) -> int | None:
        """Return the adapter that was used the longest ago, but none of `pinned`."""
        return next((number for number in self._resident if number not in pinned), None)

    def free(self, number: int) -> None:
        """Free an adapter's memory; one that is being read is freed as it arrives."""
        is_held = number in self or number in self.loading
        self._resident.pop(number, None)
        self.loading.pop(number, None)
        if is_held and self.tell is not None:
            self.tell(DropLora(number))

    def forget(self, number: int) -> None:
        self.free(number)
        self._known.pop(number, None)
        self._num_bytes.pop(number, None)


def _rank(slot: Slot) -> tuple[int, int]:
    """The one to take or to empty first."""
    return slot.num_users, slot.used


def _pin(slots: Iterable[Slot]) -> set[int]:
    """Return the adapters of running sequences."""
    return {use.number for slot in slots if slot.num_users for use in slot.loras}


class LoraSlots:
    """`num_slots` sets of adapters run at once; `num_resident` adapters are in memory, or what fits in `max_bytes`."""

    def __init__(self, num_slots: int = 0, num_resident: int | None = 0, max_bytes: int = 0) -> None:
        self.memory = LoraMemory(num_resident, max_bytes)
        self.slots = [Slot(number) for number in range(num_slots)]
        self._by_key: dict[str, Slot] = {}
        self._draining: set[int] = set()  # slots closed to other sequences in this pass
        self._wanted: set[int] = set()  # adapters that earlier sequences of this pass wait for
        self._refused: set[str] = set()  # what earlier sequences of this pass found no slot for
        self._is_short = False  # what memory becomes free is kept for an earlier sequence of this pass
        self._clock = count(1)

    def connect(self, tell: Tell) -> None:
        """Have an executor's `control` read and free adapters; without slots there are none."""
        self.memory.tell = tell if self.slots else None

    @property
    def is_loading(self) -> bool:
        return bool(self.memory.loading)

    def load(self, message: LoadLora) -> Awaited[Answer]:
        return Done(Answer(error=NO_LORAS)) if self.memory.tell is None else self.memory.load(message)

    def drop(self, number: int) -> Awaited[Answer]:
        """Forget an adapter that no sequence uses."""
        if self.memory.tell is None:
            return Done(Answer(error=NO_LORAS))
        self._clear(number)
        self.memory.forget(number)
        return Done(Answer())

    def count(self) -> dict[str, int]:
        """Return counters since the start; none without slots."""
        memory = self.memory
        counts = {
            "num_loras": len(memory),
            "num_lora_loads": memory.num_loads,
            "num_lora_evictions": memory.num_evictions,
        }
        return counts if self.slots else {}

    def check_known(self, loras: Sequence[LoraUse]) -> None:
        """Refuse a request whose adapters could never run."""
        if loras and self.memory.tell is None:
            raise InvalidRequest(NO_LORAS)
        for use in loras:
            if not self.memory.knows(use.number):
                raise InvalidRequest(f"adapter {use.name!r} is not loaded: load it first")
        if excess := self.memory.find_excess(loras):
            raise InvalidRequest(excess)
        most = self.memory.num_resident
        if most is not None and len({use.number for use in loras}) > most:
            raise InvalidRequest(f"{len(loras)} adapters in one request are over max_cpu_loras={most}: name fewer")

    def begin(self) -> None:
        """Begin a pass over the waiting sequences, in the order in which they are to be admitted."""
        self._draining.clear()
        self._wanted.clear()
        self._refused.clear()
        self._is_short = False

    def can_run(self, key: str) -> bool:
        """True if these adapters hold a slot that is not kept for an earlier sequence; or if there are none."""
        if not key:
            return True
        slot = self._by_key.get(key)
        return slot is not None and slot.number not in self._draining

    def claim(self, key: str, loras: tuple[LoraUse, ...], is_overdue: bool = True) -> bool:
        """Find a slot for a waiting sequence, or read its adapters meanwhile; False if it has to wait. Once it is
        overdue, the slot with the fewest users runs empty for it."""
        if self.can_run(key):
            return True
        if key in self._by_key or key in self._refused:
            return False
        free = [slot for slot in self.slots if slot.number not in self._draining]
        is_resident = self._are_resident(loras)
        slot = min(free, default=None, key=_rank)
        if slot is None or slot.num_users or not is_resident:
            self._refused.add(key)
            if is_overdue:
                self._drain(free, is_resident or any(use.number in self.memory.loading for use in loras))
            return False
        self._by_key.pop(slot.key, None)
        slot.key, slot.loras, slot.used = key, loras, next(self._clock)
        self._by_key[key] = slot
        return True

    def _drain(self, free: list[Slot], has_memory: bool) -> None:
        """Drain the least-used slot for a waiting sequence; if memory is short, also free unused slots."""
        if len(self._draining) * DRAINING_SHARE >= len(self.slots):
            return
        for slot in sorted(free, key=_rank):
            self._draining.add(slot.number)
            if slot.num_users or has_memory:
                return

    def take(self, key: str) -> int:
        """Return the slot of a sequence that begins to run; -1 without adapters."""
        if not key:
            return -1
        slot = self._by_key[key]
        slot.num_users += 1
        slot.used = next(self._clock)
        for use in slot.loras:
            self.memory.touch(use.number)
        return slot.number

    def release(self, key: str) -> None:
        """Take note that a sequence has left its row."""
        if key:
            self._by_key[key].num_users -= 1

    def poll(self) -> dict[int, str]:
        """Take in what has been read; returns why some adapters could not be."""
        failed = self.memory.poll()
        while self.memory.is_over and self._evict_one():
            pass
        return failed

    def wait(self) -> None:
        """Wait for the adapter that has been read the longest."""
        next(iter(self.memory.loading.values())).result()

    def _are_resident(self, loras: tuple[LoraUse, ...]) -> bool:
        """True if all are in memory; otherwise the missing ones are read, as far as there is room."""
        numbers, memory = {use.number for use in loras}, self.memory
        self._wanted |= numbers
        missing = [use.number for use in loras if use.number not in memory]
        for number in missing:
            if number in memory.loading or len(memory.loading) >= MAX_LOADING or self._is_short:
                continue
            if self._make_room(number):
                memory.fetch(number)
            else:
                self._is_short = True
        return not missing

    def _make_room(self, number: int) -> bool:
        """Evict for an adapter; False if there is no room. What is larger than all of the memory runs alone."""
        while not self.memory.has_room(number):
            if not self._evict_one():
                return not _pin(self.slots) and not self.memory.loading
        return True

    def _evict_one(self) -> bool:
        """Free the memory of the adapter that was used the longest ago; False if all are needed."""
        number = self.memory.find_idle(_pin(self.slots) | self._wanted)
        if number is None:
            return False
        self._clear(number)
        self.memory.num_evictions += 1
        self.memory.free(number)
        return True

    def _clear(self, number: int) -> None:
        """Empty the slots that have an adapter."""
        for slot in self.slots:
            if slot.has(number):
                self._by_key.pop(slot.key, None)
                slot.key, slot.loras = "", ()

    def check(self, running: Iterable[str]) -> None:
        """Require that every running sequence holds its slot, and that what slots have is in memory."""
        users = {slot.key: slot.num_users for slot in self.slots if slot.num_users}
        if users != Counter(filter(None, running)):
            raise AssertionError("the users of an adapter's slot are miscounted")
        for slot in self.slots:
            held = all(use.number in self.memory for use in slot.loras)
            if slot.key and (self._by_key.get(slot.key) is not slot or not held):
                raise AssertionError(f"slot {slot.number} has an adapter that is not in memory")
