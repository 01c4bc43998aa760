"""What the engine knows of the devices."""

from __future__ import annotations

from typing import Protocol

from penstock.engine.plan import Plan, Result


class Ticket(Protocol):
    def result(self) -> Result:
        """Wait for the plan to end. A step that failed is a result with `error` set."""


class Executor(Protocol):
    def start(self, plan: Plan) -> Ticket:
        """Begin a plan. Plans run in the order they were started."""

    def close(self) -> None: ...
