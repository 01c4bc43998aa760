"""What goes wrong on the simulated device."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.plan import Plan, Row
from tests.simulation.device import Work
from tests.simulation.model import chance


@dataclass
class Faults:
    """What goes wrong, decided by the seed and the plan's number alone."""

    seed: int = 0
    step_rate: float = 0.0
    row_rate: float = 0.0
    poison: set[str] = field(default_factory=set)  # requests that no step survives

    def of_step(self, work: Work) -> str | None:
        if any(task.device.request.id in self.poison for task in work.tasks):
            return "middle"
        draw = chance(self.seed, work.plan.number, 1) / self.step_rate if self.step_rate else 1.0
        return None if draw >= 1 else "before" if draw < 0.5 else "middle"

    def of_row(self, plan: Plan, row: Row) -> bool:
        return chance(self.seed, plan.number, row.row, 2) < self.row_rate
