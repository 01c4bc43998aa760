"""Adapters in memory, and which of them each slot has. On a CPU kernels read them where they lie: nothing is copied."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from penstock.engine.executor import Answer, Awaited, Done, DropLora, LoadLora, Values
from penstock.errors import PenstockError
from penstock.models.lora import Adapter, fingerprint, read_adapter
from penstock.ops.matmul.lora_stacks import LoraImage
from penstock.passes.lora_table import LoraTable, StackTable
from penstock.runner.memory import CPU, allocate
from penstock.types import LoraUse

CACHE_LINE = 64


class Reading:
    """The ticket of an adapter that is being read."""

    def __init__(self, future: Future[Answer]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def result(self) -> Answer:
        return self._future.result()


def settle(adapter: Adapter) -> Adapter:
    """Copy an adapter's matrices into one area of huge pages, in the order in which a step reads them."""
    found = [part for parts in adapter.parts.values() for part in parts]
    area = allocate(sum(_round_up(each.nbytes) for part in found for each in (part.a, part.b)), CPU)
    begin = 0

    def place(tensor: Tensor) -> Tensor:
        nonlocal begin
        room = area[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        begin += _round_up(tensor.nbytes)
        return room.copy_(tensor)

    settled = {}
    for name, parts in adapter.parts.items():
        inner = [place(part.a) for part in parts]
        settled[name] = [replace(part, a=a, b=place(part.b)) for part, a in zip(parts, inner)]
    return replace(adapter, parts=settled)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE


class LoraBank:
    """Reads in a thread of its own, so that steps go on meanwhile."""

    def __init__(self, table: LoraTable, max_rank: int) -> None:
        self.table, self.max_rank = table, max_rank
        self._adapters: dict[int, Adapter | LoraImage] = {}
        self._slots: list[tuple[LoraUse, ...]] = [()] * table.num_slots
        self._dropped: set[int] = set()  # while they were read
        self._lock = threading.Lock()  # guards what is in memory; slots are the step's thread's
        self._readers = ThreadPoolExecutor(1, "penstock-lora")

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def load(self, message: LoadLora) -> Awaited[Answer]:
        return Reading(self._readers.submit(self._load, message))

    def _load(self, message: LoadLora) -> Answer:
        try:
            return Answer(self._read(message))
        except Exception as error:  # whatever is wrong with a file must reach those who wait for it
            self._dropped.discard(message.number)
            is_known = isinstance(error, PenstockError)
            return Answer(
                error=str(error) if is_known else f"{message.path} cannot be read ({type(error).__name__}: {error})"
            )

    def _read(self, message: LoadLora) -> Values:
        folder = Path(message.path)
        before = fingerprint(folder)
        if message.fingerprint and before != message.fingerprint:
            raise PenstockError(f"{folder} has changed since the adapter was loaded: load it again")
        read, table = read_adapter(folder, self.table.spec, self.max_rank, self.table.bases), self.table
        adapter = table.arrange(read) if isinstance(table, StackTable) else settle(read)
        if fingerprint(folder) != before:
            raise PenstockError(f"{folder} changed while it was read: load it again")
        with self._lock:
            if message.number in self._dropped:
                self._dropped.remove(message.number)
            else:
                self._adapters[message.number] = adapter
        return {"fingerprint": before, "rank": adapter.rank, "num_bytes": adapter.num_bytes}

    def drop(self, message: DropLora) -> Done[Answer]:
        """Forget an adapter; one that is still being read is forgotten as it arrives."""
        for slot, uses in enumerate(self._slots):
            if any(use.number == message.number for use in uses):
                self.enter(slot, ())
        with self._lock:
            if self._adapters.pop(message.number, None) is None:
                self._dropped.add(message.number)
        return Done(Answer())

    def enter(self, slot: int, uses: tuple[LoraUse, ...]) -> None:
        """Put a request's adapters, which must be in memory, into a slot."""
        if slot < 0 or self._slots[slot] == uses:
            return
        with self._lock:
            adapters = [(self._adapters[use.number], use.scale) for use in uses]
        self._slots[slot] = ()  # a failure below leaves it without a label
        self.table.fill(slot, adapters)
        self._slots[slot] = uses

    def close(self) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)
