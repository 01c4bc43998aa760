"""Who was overtaken how often.

Only first admissions count (a preempted sequence that returns was ahead before), and only requests that share no
prefix are watched: any other may rightly wait for a prefix that is being computed.
"""

from __future__ import annotations

from penstock.engine.plan import Plan
from penstock.engine.scheduling.policy import PASSES
from penstock.types import Request
from tests.simulation.device import require
from tests.simulation.workload import LONER


class Fairness:
    def __init__(self, policy: str, max_num_seqs: int) -> None:
        self.policy = policy
        # One plan may admit as many sequences as there are rows before the order is made anew.
        self.most = PASSES + max_num_seqs if policy in ("sjf", "lpm") else 0
        self.waiting: dict[str, Request] = {}
        self.numbers: dict[str, int] = {}
        self.overtaken: dict[str, int] = {}
        self.seen: set[tuple[str, int]] = set()
        self.worst = 0

    def enter(self, request: Request) -> None:
        self.numbers[request.id] = len(self.numbers)
        if request.tokens[0] >= LONER and request.num_siblings == 1:
            self.waiting[request.id] = request
            self.overtaken[request.id] = 0

    def leave(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)

    def observe(self, plan: Plan) -> None:
        for admission in plan.admissions:
            request, name = admission.request, (admission.request.id, admission.sibling)
            if name in self.seen or (request.beam and admission.sibling):
                continue
            self.seen.add(name)
            self.leave(request.id)
            for other in self.waiting.values():
                if self.numbers[other.id] < self.numbers[request.id] and self._unfair(other, request):
                    self.overtaken[other.id] += 1
                    self.worst = max(self.worst, self.overtaken[other.id])
                    require(self.overtaken[other.id] <= self.most, "overtaken too often", other.id, request.id)

    def _unfair(self, other: Request, request: Request) -> bool:
        if request.tenant != other.tenant:
            return False  # shares of the cache decide among tenants
        return self.policy != "priority" or request.priority >= other.priority
