"""A plan's copies between the pool and the store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from penstock.cache.store import Transfer
from penstock.runner.memory import BlockMemory
from penstock.runner.store.blocks import BlockStore

_log = logging.getLogger(__name__)


class Copies(Protocol):
    """A plan, or what a rank is told of one."""

    @property
    def saves(self) -> Sequence[Transfer]: ...

    @property
    def loads(self) -> Sequence[Transfer]: ...


def transfer(copies: Copies, memory: BlockMemory, store: BlockStore | None) -> list[bytes]:
    """Save and load what is said; returns the names of blocks to be loaded that are lost. A save may fail."""
    if store is None or not (copies.saves or copies.loads):
        return []
    try:
        for save in copies.saves:
            store.save(save.name, memory.read(save.blocks))
    except Exception:
        _log.exception("cache blocks could not be saved")
    lost = []
    for load in copies.loads:  # all of them: what is lost is saved again once it is known to be
        data = store.load(load.name)
        if data is None or not memory.write(load.blocks, data):
            store.drop(load.name)
            lost.append(load.name)
    return lost
