"""The engine process's view of its ranks: what each is, their pulses, and the loss of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.engine.executor import Executor
from penstock.engine.ipc import Heartbeat
from penstock.engine.ranks import RankRecord
from penstock.errors import RankLost


def watch_ranks(executor: Executor, pulse: Heartbeat, on_loss: Callable[[RankLost], None]) -> list[RankRecord]:
    """Let heartbeats tell of several ranks, and call `on_loss`, in any thread, when one is lost; returns what they
    are."""
    if not hasattr(executor, "crew"):
        return []
    from penstock.runner.ranks.executor import RankExecutor
    from penstock.runner.ranks.facts import list_pulses

    assert isinstance(executor, RankExecutor)
    pulse.list_ranks = partial(list_pulses, executor.crew)
    executor.crew.on_loss = on_loss
    if executor.crew.failure is not None:  # meanwhile
        on_loss(executor.crew.failure)
    return executor.facts
