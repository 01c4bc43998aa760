"""The executor that runs plans in this process, one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.plan import Plan, Result
from penstock.runner.runner import Runner


@dataclass(frozen=True)
class Done:
    outcome: Result

    def result(self) -> Result:
        return self.outcome


class LocalExecutor:
    def __init__(self, runner: Runner) -> None:
        self.runner: Runner | None = runner

    def start(self, plan: Plan) -> Done:
        if self.runner is None:
            raise RuntimeError("the executor is closed")
        return Done(self.runner.run(plan))

    def close(self) -> None:
        self.runner = None
