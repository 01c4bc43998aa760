"""A small engine on the simulated device, whose every plan and delta is kept to be looked at."""

from __future__ import annotations

from typing import Any

from penstock.cache.group import Group, StateSpec
from penstock.cache.kv import KVCache
from penstock.engine.engine import Engine
from penstock.engine.executor import Answer, Awaited, Ticket
from penstock.engine.plan import Plan, Result
from penstock.engine.scheduling.prompt_cap import PromptCap
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.types import Delta, Request, SamplingParams
from tests.simulation.executor import FakeExecutor
from tests.simulation.faults import Faults
from tests.simulation.forward import Drafting
from tests.simulation.inspection import Limits
from tests.simulation.keeping import FakeStore, offload_to
from tests.simulation.ledger import Ledger
from tests.simulation.model import Model

FULL = Group(StateSpec("full", bytes_per_position=1), (0,))
STATE = Group(StateSpec("recurrent", num_rows=1, row_bytes=4), (2,), blocks_per_state=1)


def window(width: int) -> Group:
    return Group(StateSpec("window", bytes_per_position=1, window=width), (1,))


class Stage:
    """Also the engine's executor: it keeps each plan and passes it on."""

    def __init__(
        self,
        *groups: Group,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        policy: str = "fcfs",
        capacity: str = "ondemand",
        caching: bool = True,
        overlap: int = 0,
        faults: Faults | None = None,
        drafting: Drafting | None = None,
        lazy: bool = True,
        stateless: bool = False,
        prompt_cap: PromptCap | None = None,
        trees: bool = False,
        store: FakeStore | None = None,
    ) -> None:
        self.verifies_trees = trees
        groups = () if stateless else groups or (FULL,)
        offloading = None if store is None else offload_to(store)
        self.cache = KVCache(num_blocks, block_size, groups, caching, 1, offloading)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=max_num_seqs,
            policy=policy,
            capacity=capacity,
            max_num_batched_tokens=max_num_batched_tokens,
            prompt_cap=prompt_cap,
        )
        self.model = Model(self.cache.groups)
        self.device = FakeExecutor(
            self.cache,
            self.model,
            Limits(max_num_seqs, max_num_batched_tokens),
            faults=faults,
            drafting=drafting,
            lazy=lazy,
            trees=trees,
            store=store,
        )
        self.engine = Engine(self.scheduler, self, overlap)
        self.ledger = Ledger(self.model)
        self.plans: list[Plan] = []
        self.deltas: list[Delta] = []
        self.num_added = 0

    @property
    def stats(self) -> Any:
        return self.scheduler.stats

    def start(self, plan: Plan) -> Ticket[Result]:
        self.plans.append(plan)
        return self.device.start(plan)

    def control(self, message: object) -> Awaited[Answer]:
        return self.device.control(message)

    def close(self) -> None:
        self.device.close()

    def add(self, prompt: int | list[int], max_tokens: int = 4, **options: Any) -> Request:
        """A prompt of so many tokens that share nothing, or these tokens. Fields of Request and of SamplingParams."""
        self.num_added += 1
        tokens = prompt if isinstance(prompt, list) else [1000 * self.num_added + i for i in range(prompt)]
        names = SamplingParams.__dataclass_fields__.keys() - {"seed", "bad_words", "session", "cache_priority"}
        sampling = {name: options.pop(name) for name in list(options) if name in names}
        options.setdefault("id", f"r{self.num_added}")
        options.setdefault("seed", self.num_added)
        request = Request(
            tokens=tuple(tokens),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            max_tokens=max_tokens,
            **options,
        )
        self.engine.add(request)
        self.ledger.enter(request)
        return request

    def abort(self, request: Request, sibling: int | None = None) -> list[Delta]:
        deltas = self.engine.abort(request.id, sibling)
        self._note(deltas)
        self.scheduler.check()
        return deltas

    def step(self, times: int = 1) -> list[Delta]:
        """The deltas of the last step."""
        deltas: list[Delta] = []
        for _ in range(times):
            deltas = self.engine.step()
            self._note(deltas)
            self.scheduler.check()
        return deltas

    def _note(self, deltas: list[Delta]) -> None:
        self.deltas += deltas
        for delta in deltas:
            self.ledger.note(delta)

    def run(self, most: int = 2000) -> None:
        """Until nothing is left; every answer is the right one and every block is back."""
        for _ in range(most):
            if not self.engine.has_work:
                break
            self.step()
        self.engine.save(everything=True)
        assert not self.engine.has_work, "no end in sight"
        assert not self.ledger.open
        assert self.cache.pool.num_used == self.cache.pool.num_limbo == 0

    def finished(self) -> list[str]:
        """Ids in the order of their ends."""
        return [delta.request_id for delta in self.deltas if delta.finish_reason]

    def admitted(self) -> list[str]:
        """Ids in the order of admissions, returns included."""
        return [admission.request.id for plan in self.plans for admission in plan.admissions]

    def counts(self) -> list[list[int]]:
        """Per plan, how many positions each row computes."""
        return [[row.count for row in plan.rows] for plan in self.plans]

    def sequences(self, request: Request) -> list[Sequence]:
        return self.scheduler.roster.requests[request.id]
