"""A plan's copies between the pool and the store."""

from __future__ import annotations

import logging

from penstock.engine.plan import Plan
from penstock.runner.memory import BlockMemory
from penstock.runner.store.blocks import BlockStore

_log = logging.getLogger(__name__)


def transfer(plan: Plan, memory: BlockMemory, store: BlockStore | None) -> bool:
    """Save and load what the plan says; False if a block to be loaded is lost. A save may fail."""
    if store is None or not (plan.saves or plan.loads):
        return True
    try:
        for save in plan.saves:
            store.save(save.name, memory.read(save.blocks))
    except Exception:
        _log.exception("cache blocks could not be saved")
    is_whole = True
    for load in plan.loads:  # all of them: what is lost is saved again once it is known to be
        data = store.load(load.name)
        if data is None or not memory.write(load.blocks, data):
            store.drop(load.name)
            is_whole = False
    return is_whole
