"""The engine process's view of its ranks: what each is, their heartbeats, and the loss of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.engine.executor import Executor
from penstock.engine.ipc import Heartbeat
from penstock.engine.ranks import RankRecord
from penstock.errors import RankLost


def watch_ranks(executor: Executor, heartbeat: Heartbeat, on_loss: Callable[[RankLost], None]) -> list[RankRecord]:
    """Let heartbeats tell of several ranks, and call `on_loss`, in any thread, when one is lost; returns what they
    are."""
    if not hasattr(executor, "group"):
        return []
    from penstock.runner.ranks.executor import RankExecutor
    from penstock.runner.ranks.facts import list_beats

    assert isinstance(executor, RankExecutor)
    heartbeat.list_ranks = partial(list_beats, executor.group)
    executor.group.on_loss = on_loss
    if executor.group.failure is not None:  # meanwhile
        on_loss(executor.group.failure)
    return executor.facts
