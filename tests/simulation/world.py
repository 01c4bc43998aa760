"""A scheduler, a fake device, a virtual clock and a workload; every invariant is checked as it runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq

from penstock.engine.engine import Engine
from penstock.engine.executor import Answer, Awaited, Describe, Ticket
from penstock.engine.plan import Draft, Plan, Result
from penstock.engine.scheduling.prompt_cap import PromptCap
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.speculation import SpeculationController
from penstock.engine.sequence import Sequence, Status
from penstock.errors import InvalidRequest
from tests.simulation.device import require
from tests.simulation.executor import FakeExecutor
from tests.simulation.fairness import Fairness
from tests.simulation.faults import Faults
from tests.simulation.forward import Drafting
from tests.simulation.inspection import Limits
from tests.simulation.keeping import FakeStore
from tests.simulation.ledger import Ledger
from tests.simulation.model import Model
from tests.simulation.scenario import Scenario, draw_scenario
from tests.simulation.tenancy import Tenancy
from tests.simulation.workload import Workload

QUEUE = 24  # while so many sequences wait nothing arrives; fewer where the budget is tiny
RARE = ("paused", "beam", "suspect", "preempted", "forked")  # states to be aborted in oftener


class Whim(SpeculationController):
    """Verifies as much of each draft as it feels like."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)

    def choose(self, drafts: Seq[Seq[Draft]], num_rows: int, room: int, is_mixed: bool) -> list[int]:
        return [self.rng.randint(0, len(line)) for line in drafts]

    def all_wait(self, num_rows: int, gains: Seq[float]) -> bool:
        return self.rng.random() < 0.3


class WhimCap(PromptCap):
    """Lets as many prompt tokens into a step as it feels like."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)

    def choose(self, num_decode: int, backlog: int) -> int | None:
        require(backlog > 0 and num_decode >= 0, "a cap without a prompt", num_decode, backlog)
        return self.rng.randint(1, 8) if num_decode else None


class World:
    """Also the engine's executor: it shows every plan to the fairness watch before the device gets it."""

    def __init__(self, scenario: Scenario, store: FakeStore | None = None) -> None:
        """`store`: what a world before this one left."""
        self.scenario = scenario
        self.rng = random.Random(scenario.seed * 31 + 2)
        self.store = store or scenario.make_store()
        self.cache = scenario.make_cache(self.store)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=scenario.max_num_seqs,
            policy=scenario.policy,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            capacity=scenario.capacity,
            speculation=Whim(scenario.seed) if scenario.seed % 2 else None,
            prompt_cap=WhimCap(scenario.seed) if scenario.seed % 4 > 1 else None,
            exact_starts=scenario.seed % 5 == 0,
        )
        self.scheduler.roster.sessions._clock = lambda: self.now_s
        self.model = Model(self.cache.groups)
        self.device = FakeExecutor(
            self.cache,
            self.model,
            Limits(scenario.max_num_seqs, scenario.max_num_batched_tokens),
            faults=Faults(scenario.seed, scenario.step_fault_rate, scenario.row_fault_rate),
            lazy=scenario.lazy,
            trees=self.verifies_trees,
            drafting=Drafting(scenario.draft_rate, scenario.draft_longest, scenario.draft_accuracy),
            store=self.store,
            counts=scenario.seed % 5 > 0,
        )
        self.engine = Engine(self.scheduler, self, scenario.overlap)
        self.workload = Workload(scenario)
        self.ledger = Ledger(self.model)
        self.fairness = Fairness(scenario.policy, scenario.max_num_seqs)
        self.tenancy = Tenancy(self.scheduler)
        self.now_s = 0.0
        self.aborted: Counter[str] = Counter()
        self.num_beams = 0
        self.most_preempted = 0

    @property
    def num_steps(self) -> int:
        return self.scheduler.stats.num_steps

    @property
    def verifies_trees(self) -> bool:
        return self.scenario.trees

    def start(self, plan: Plan) -> Ticket[Result]:
        self.fairness.observe(plan)
        self.now_s += 1 + plan.num_tokens / 16
        return self.device.start(plan)

    def control(self, message: object) -> Awaited[Answer]:
        return self.device.control(message)

    def close(self) -> None:
        self.device.close()

    def run(self, steps: int) -> Counter[str]:
        """Some load for `steps` steps, then until nothing is left."""
        while self.num_steps < steps:
            self._arrive()
            if self.rng.random() < self.scenario.abort_rate * 4:
                self._abort()
            self._step()
        self._drain()
        return self.census()

    def _arrive(self) -> None:
        if len(self.scheduler.roster.waiting) >= min(QUEUE, 4 * self.scenario.max_num_batched_tokens):
            return
        if not self.engine.has_work:
            self.engine.save()
            self.now_s = max(self.now_s, self.workload.next_s)
        for request in self.workload.due(self.now_s):
            try:
                self.engine.add(request)
            except InvalidRequest as error:
                require(len(str(error)) > 20 and request.id not in self.scheduler.roster.requests, "refused badly")
                continue
            self.ledger.enter(request)
            self.fairness.enter(request)
            self.num_beams += request.beam is not None
            if self.rng.random() < self.scenario.poison_rate:
                self.device.faults.poison.add(request.id)

    def _step(self) -> None:
        for delta in self.engine.step():
            self.ledger.note(delta)
            if delta.finish_reason == "error":
                name = (delta.request_id, delta.sibling)
                blamed = {request_id for request_id, _ in self.device.blamed}
                require(
                    name in self.device.blamed or delta.request_id in blamed and not delta.sibling,
                    "an innocent ends with an error",
                    delta,
                )
            elif delta.tokens:
                require(delta.request_id not in self.device.faults.poison, "poison answers", delta)
        self._check_cheaply()
        if self.num_steps % self.scenario.check_every == 0:
            self.scheduler.check()
            answer = self.engine.control(Describe())
            require(answer.values["num_plans"] == self.num_steps, "a message overtakes a plan", answer)

    def _check_cheaply(self) -> None:
        roster, pool = self.scheduler.roster, self.cache.pool
        require(len(roster.running) + len(roster.rows) == self.scenario.max_num_seqs, "a row is lost", roster.rows)
        if not self.device.unfinished:
            require(pool.num_limbo == 0, "a block waits for a plan that has ended", pool.num_limbo)
        if not roster.running:
            require(pool.num_used == 0, "blocks are used by nobody", pool.num_used)
        self.most_preempted = max([self.most_preempted, *(s.num_preempted for s in roster.waiting)])
        require(set(roster.requests) == set(self.ledger.open), "a request is lost or kept", list(roster.requests))

    def _abort(self) -> None:
        """A request or one sibling, in a state that is drawn first, so that rare states get their share."""
        kinds: dict[str, list[tuple[str, int | None]]] = {"unknown": [("nobody", None)]}
        for sequence in self.scheduler.roster.waiting + self.scheduler.roster.running:
            for kind in self._kinds(sequence):
                whole = kind != "sibling"
                kinds.setdefault(kind, []).append((sequence.request.id, None if whole else sequence.sibling))
        rare = [kind for kind in RARE if kind in kinds]
        if not rare and self.rng.random() < 0.75:
            return
        kind = self.rng.choice(sorted(kinds) + rare)
        request_id, sibling = self.rng.choice(kinds[kind])
        deltas = self.engine.abort(request_id, sibling)
        self.aborted[kind] += 1
        for delta in deltas:
            require(delta.finish_reason == "abort", "an abort with another end", delta)
            self.ledger.note(delta)
        roster = self.scheduler.roster
        left = [s for s in roster.waiting + roster.running if s.request.id == request_id]
        require(all(sibling is not None and s.sibling != sibling for s in left), "an aborted sequence lives on", left)
        if request_id not in roster.requests:
            self.fairness.leave(request_id)
        self.scheduler.check()
        self._check_cheaply()

    def _kinds(self, sequence: Sequence) -> list[str]:
        runs = sequence.status is Status.RUNNING
        kinds = {
            "waiting": not runs and not sequence.epoch,
            "preempted": not runs and sequence.num_preempted > 0,
            "prefill": runs and sequence.num_output == 0 and 0 < sequence.settled < sequence.num_prompt,
            "decoding": runs and sequence.num_output > 0,
            "in_flight": bool(sequence.flights),
            "paused": bool(sequence.candidates),
            "beam": sequence.beam is not None and sequence.sibling > 0,
            "forked": runs and sequence.leader is not None,
            "sibling": sequence.request.num_siblings > 1,
            "leader": sequence.sibling == 0 and sequence.request.num_siblings > 1,
            "suspect": sequence.suspect > 0,
        }
        return [kind for kind, applies in kinds.items() if applies]

    def _drain(self) -> None:
        """Nothing new arrives: everyone must finish, soon, and give everything back."""
        owed = sum(
            (len(account.request.tokens) + account.request.max_tokens)
            * max(account.request.num_siblings, account.request.beam.beam_width if account.request.beam else 1)
            for account in self.ledger.open.values()
        )
        last = self.num_steps + 100 + 4 * owed
        while self.engine.has_work:
            self._step()
            require(self.num_steps <= last, "no end in sight", self.num_steps, last)
        self.engine.save(everything=True)
        require(not self.engine.has_saves, "something is never saved")
        self.engine.close()
        self.scheduler.check()
        roster, pool = self.scheduler.roster, self.cache.pool
        require(not self.ledger.open and not roster.requests, "a request never ended", list(self.ledger.open))
        require(not roster.prefixes._keys, "a prefix is awaited for ever")
        require(
            pool.num_used == 0 and not self.cache.copies.pending,
            "something is left",
            pool.num_used,
            self.cache.copies.pending,
        )
        self._check_waste()
        self.cache.tree.clear()
        require(pool.num_free == pool.num_blocks, "blocks are lost", pool.num_free)
        require(not list(self.cache.tree.nodes()), "nodes without blocks are left in the tree")

    def _check_waste(self) -> None:
        """Preemption must stay rare, and what is computed again must stay less than what is computed once.

        A sequence that was preempted k times returns only where there are 2**k more blocks for it, so it runs to its
        end after about log2(its blocks) returns; priorities, failed steps and beams that take turns may add to that.
        """
        scenario, tally = self.scenario, self.device.tally
        orderly = scenario.policy != "priority" and not self.num_beams
        once = tally.num_computed - tally.num_recomputed
        calm = orderly and not (scenario.step_fault_rate or scenario.poison_rate or scenario.offloads)
        most = (0.5 if calm else 2.0) * once + 8 * scenario.longest
        require(tally.num_recomputed <= most, "too much is computed again", tally)
        if orderly:
            require(
                self.most_preempted <= 3 + scenario.longest.bit_length(), "preempted too often", self.most_preempted
            )
        # A window gives its blocks back one plan late: with overlap it may hold more than was reserved for it.
        late = scenario.overlap and any(group.spec.kind == "window" for group in scenario.groups)
        if scenario.capacity == "reserve" and orderly and not late:
            require(self.scheduler.stats.num_preemptions == 0, "preempted in spite of the reserve")

    def census(self) -> Counter[str]:
        """What happened."""
        stats, tally = self.scheduler.stats, self.device.tally
        told = {name: getattr(stats, name) for name in stats.__slots__ if name != "max_batch_size"}
        require(
            sum(told.pop("num_accepted_at")) <= stats.num_accepted_tokens <= stats.num_draft_tokens, "more accepted"
        )
        told.pop("drafters")
        census = Counter(told)
        census.update({name: getattr(tally, name) for name in tally.__dataclass_fields__})
        census["num_failed_steps"] = tally.num_failed_steps
        census["num_preempted_across"] = self.tenancy.num_across
        census["num_evicted"] = self.cache.tree.num_evicted
        census["num_copies"] = self.cache.copies.num_copied
        census["num_saved"] = self.store.num_saved if self.store else 0
        census["num_loaded"] = self.cache.loads.num_loaded
        census["num_delivered"] = self.ledger.num_tokens
        for kind, count in self.aborted.items():
            census[f"abort_{kind}"] = count
        for reason, count in self.ledger.reasons.items():
            census[f"end_{reason}"] = count
        return census


def simulate(seed: int, steps: int) -> Counter[str]:
    return World(draw_scenario(seed)).run(steps)
