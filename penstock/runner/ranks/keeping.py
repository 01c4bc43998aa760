"""The store of several ranks: each keeps its own part of every block, and a block is there if all have theirs.

Rank 0's index decides what is looked for. If any rank has lost its part, rank 0 forgets its own, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from penstock.engine.executor import Answer
from penstock.engine.plan import Plan
from penstock.runner.memory import BlockMemory
from penstock.runner.ranks.group import RankGroup
from penstock.runner.ranks.messages import KeepBlocks
from penstock.runner.store.blocks import BlockStore
from penstock.runner.store.transfer import transfer

LOST = "lost"


def keep(message: KeepBlocks, memory: BlockMemory, store: BlockStore | None) -> Answer:
    """Obey on a rank: copy its part of blocks, flush or empty its store."""
    if store is None:
        return Answer()
    if any(not store.has(load.name) for load in message.loads):
        store.refresh()
    lost = transfer(message, memory, store)
    if message.flush:
        store.flush()
    if message.forget:
        store.forget()
    return Answer({LOST: [name.hex() for name in lost]})


class Sender(Protocol):
    """Numbers the messages to the other ranks."""

    def number(self) -> int:
        """Return the next number, once rank 0's part of all plans so far is computed: the others wait for it."""


class SharedStore:
    """Rank 0's store as the scheduler sees it; what is done to it is done to all."""

    def __init__(self, own: BlockStore, memory: BlockMemory, group: RankGroup) -> None:
        self._own, self._memory, self._group = own, memory, group
        self.sender: Sender | None = None  # until the ranks are joined nothing is kept

    def has(self, name: bytes) -> bool:
        return self._own.has(name)

    def refresh(self) -> None:
        self._own.refresh()

    def count(self) -> dict[str, int]:
        return self._own.count()

    def flush(self) -> None:
        self._tell(KeepBlocks(0, flush=True))

    def forget(self) -> None:
        self._tell(KeepBlocks(0, forget=True))

    def restore(self, plan: Plan) -> bool:
        """Copy what a plan saves and loads on all ranks; False if a part of a block is lost."""
        lost = self._tell(KeepBlocks(0, plan.saves, plan.loads))
        for name in lost:
            self._own.drop(name)
        return not lost

    def _tell(self, message: KeepBlocks) -> set[bytes]:
        """Have all ranks obey; returns the names of blocks that were lost."""
        assert self.sender is not None
        message = replace_number(message, self.sender.number())
        self._group.broadcast(message)
        answers = [keep(message, self._memory, self._own), *self._group.await_answers(message.number).values()]
        return {bytes.fromhex(name) for answer in answers for name in answer.values.get(LOST, ())}


def replace_number(message: KeepBlocks, number: int) -> KeepBlocks:
    return KeepBlocks(number, message.saves, message.loads, message.flush, message.forget)


def without_copies(plan: Plan) -> Plan:
    return replace(plan, saves=(), loads=())
