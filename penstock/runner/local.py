"""The executor that runs plans in this process."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.engine.executor import Ticket
from penstock.engine.plan import Plan, Result
from penstock.runner.runner import Runner


@dataclass(frozen=True)
class Done:
    outcome: Result

    def result(self) -> Result:
        return self.outcome


class Starts(Protocol):
    """A runner that starts plans without waiting for their end."""

    def start(self, plan: Plan) -> Ticket: ...

    def close(self) -> None: ...


class LocalExecutor:
    def __init__(self, runner: Runner | Starts) -> None:
        self.runner: Runner | Starts | None = runner

    def start(self, plan: Plan) -> Ticket:
        if self.runner is None:
            raise RuntimeError("the executor is closed")
        return Done(self.runner.run(plan)) if isinstance(self.runner, Runner) else self.runner.start(plan)

    def close(self) -> None:
        """What a GPU holds is freed with the runner, and given back to others."""
        if self.runner is not None and not isinstance(self.runner, Runner):
            self.runner.close()
        self.runner = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gc.collect()
            torch.cuda.empty_cache()
