"""Who gave way to whom: a tenant within its share of the cache loses nothing to another while one is above its own."""

from __future__ import annotations

from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from tests.simulation.device import require


class Tenancy:
    """Watches one scheduler's preemptions for lack of blocks, and counts those that cross tenants."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.needy: Sequence | None = None
        self.num_across = 0
        self._make_room, self._preempt = scheduler._preemption.make_room, scheduler._preemption.preempt
        scheduler._preemption.make_room = self._note_needy  # type: ignore[method-assign]
        scheduler._preemption.preempt = self._note_victim  # type: ignore[method-assign]

    def _note_needy(self, sequence: Sequence, count: int) -> int:
        self.needy = sequence
        try:
            return self._make_room(sequence, count)
        finally:
            self.needy = None

    def _note_victim(self, victim: Sequence, why: str = "", tenant: str = "") -> None:
        if self.needy is not None and self.needy.request.tenant != victim.request.tenant:
            self.num_across += 1
            above = self.above()
            require(
                not above or victim.request.tenant in above,
                "a tenant within its share gave way to another",
                victim.request.tenant,
                above,
            )
        self._preempt(victim, why, tenant)

    def above(self) -> set[str]:
        roster, above = self.scheduler.roster, set()
        tenants = {s.request.tenant for s in roster.running + roster.waiting}
        for tenant in tenants:
            held = {
                block
                for s in roster.running
                if s.request.tenant == tenant
                for g, table in enumerate(s.held.tables)
                for block in table[s.held.first[g] :]
            }
            if len(held) * len(tenants) > self.scheduler.cache.pool.num_blocks:
                above.add(tenant)
        return above
