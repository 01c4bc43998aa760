"""Each step every sequence gets a count of tokens out of one budget. Decode, prefill, chunk, verify: all the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from penstock.cache.kv import KVCache
from penstock.cache.radix import Root
from penstock.config.speculation import MODEL_METHODS
from penstock.engine.draft_tree import compute_path_chances, keep_likeliest, take_line
from penstock.engine.loras import LoraSlots
from penstock.engine.plan import Plan, Result
from penstock.engine.scheduling.accounts import Accounts, Entry, Started, Stats
from penstock.engine.scheduling.beam import BeamGroup
from penstock.engine.scheduling.capacity import Capacity, Shares
from penstock.engine.scheduling.drafts.waits import MIN_GAIN
from penstock.engine.scheduling.fast_path import DecodeFastPath
from penstock.engine.scheduling.plan_builder import PlanBuilder
from penstock.engine.scheduling.policy import make_policy
from penstock.engine.scheduling.prompt_cap import PromptCap
from penstock.engine.scheduling.roster import Roster
from penstock.engine.scheduling.speculation import SpeculationController
from penstock.engine.scheduling.waiting import Preemption, WaitingQueue
from penstock.engine.sequence import Sequence, Status
from penstock.errors import InvalidConfig, InvalidRequest
from penstock.types import Delta, Request

log = logging.getLogger("penstock.engine")
MIN_SPARE_BLOCKS = 32  # beside those of two steps, for drafts to be verified


def list_ready(running: list[Sequence], num_batches: int) -> list[Sequence]:
    """Return sequences the next of `num_batches` concurrent plans may run."""
    if num_batches == 1:
        return running
    ready = [sequence for sequence in running if not sequence.expected and sequence.remaining]
    return ready[: -(-len(running) // num_batches)]


class Scheduler:
    """Makes plans and accounts for them. Pure: no clock, no device, no text."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
        capacity: str = "ondemand",
        speculation: SpeculationController | None = None,
        prompt_cap: PromptCap | None = None,
        exact_starts: bool = False,
    ) -> None:
        """Without a controller, drafts that come with results are verified as they come; without a cap, prompts take
        what the budget has left. With `exact_starts` the executor knows no count of its own: a row that has drafts, or
        whose drafts are verified, waits for its own plans."""
        if capacity not in ("ondemand", "reserve"):
            raise InvalidConfig(f"capacity={capacity!r} is unknown: choose ondemand or reserve")
        self.cache = cache
        self.policy = make_policy(policy)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stats = Stats()
        self.roster = Roster(cache, max_num_seqs)
        self._capacity = Capacity(cache, self.roster, max_num_batched_tokens, capacity == "reserve")
        self._shares = Shares(cache, self.roster, self.policy.rank)
        self._fast_path = DecodeFastPath(cache, exact_starts)
        self._accounts = Accounts(cache, self.roster, self.stats, self._fast_path)
        self._builder = PlanBuilder(cache, self.roster, self._capacity, self.stats, exact_starts)
        self._preemption = Preemption(cache, self.roster, self._shares, self.policy, self._builder, self.stats)
        self._queue = WaitingQueue(
            cache, self.roster, self._capacity, self._shares, self.policy, self._builder, self._preemption, self.stats
        )
        self._speculation = None if cache.recurrent else speculation
        self._prompt_cap = prompt_cap
        self._exact_starts = exact_starts
        self.num_batches = 1  # plans under way at once, of a pipeline
        self._arrivals = 0
        self._started: dict[int, Started] = {}

    def enable_loras(self, num_slots: int, num_resident: int | None, max_bytes: int = 0) -> None:
        """Serve adapters from now on: `num_slots` sets of them at once, and `num_resident` adapters in memory, or if
        None as many as fit in `max_bytes`."""
        self.roster.loras = LoraSlots(num_slots, num_resident, max_bytes)

    def plan_trees(self, can_verify: bool) -> None:
        """Plan trees of draft tokens from now on, or a line of each where the executor cannot verify trees."""
        self._builder.trees = can_verify

    @property
    def has_work(self) -> bool:
        return bool(self.roster.waiting or self.roster.running)

    def add(
        self, request: Request, outputs: Mapping[int, Seq[int]] | None = None, mus: Mapping[int, float] | None = None
    ) -> None:
        """Take a request into the queue, or refuse it for good. `outputs`: where another engine began it, its open
        siblings and their tokens so far; they go on as if preempted, with mirostat at `mus`."""
        try:
            self._capacity.require_fit(request)
            self.roster.loras.check_known(request.loras)
        except InvalidRequest:
            self.stats.num_refused += 1
            raise
        if self.cache.saves is not None:
            self.cache.saves.store.refresh()
        self._arrivals += 1
        self.stats.num_requests += 1
        begun = sorted((outputs or dict.fromkeys(range(request.num_siblings), ())).items())
        first, *siblings = [
            Sequence(request, self._arrivals, sibling, [*request.tokens, *tokens], mu=(mus or {}).get(sibling))
            for sibling, tokens in begun
        ]
        if request.beam:
            first.beam = BeamGroup(request.beam, frozenset(request.stop_token_ids), [first])
        for sibling in siblings:
            sibling.leader = first
        self.roster.enter(request, [first, *siblings])

    def count_known(self, request: Request) -> int:
        """Count the tokens of a request's prompt that are in the cache, once what others put into the store is seen."""
        if self.cache.saves is not None:
            self.cache.saves.store.refresh()
        return self.cache.match(Root(request.salt, request.num_public, request.lora_key), request.tokens)

    def abort(self, request_id: str, sibling: int | None = None, reason: str = "abort") -> list[Delta]:
        """End a request, or one of its siblings, now; its blocks are free as soon as no started plan names them."""
        deltas: list[Delta] = []
        for sequence in list(self.roster.requests.get(request_id, ())):
            if not sequence.done and (sibling is None or sibling == sequence.sibling or sequence.beam):
                self.roster.finish(sequence)
                if not (sequence.beam and deltas):
                    deltas.append(Delta(request_id, 0 if sequence.beam else sequence.sibling, finish_reason=reason))
        self.stats.num_aborted += len(deltas) if reason == "abort" else 0
        return deltas

    def poll_loras(self) -> list[Delta]:
        """Take in the adapters that have been read, and end the requests of those that could not be."""
        deltas: list[Delta] = []
        failed = self.roster.loras.poll()
        for sequence in [one for sequences in self.roster.requests.values() for one in sequences]:
            excess = self.roster.loras.memory.find_excess(sequence.request.loras)
            if excess and not sequence.done:
                deltas += self._accounts.end_with_error(sequence, excess)
        for number, why in failed.items():
            log.error("adapter %d cannot be read again: %s", number, why)
            for sequence in [one for sequences in self.roster.requests.values() for one in sequences]:
                name = next((use.name for use in sequence.request.loras if use.number == number), None)
                if not sequence.done and name is not None:
                    error = f"adapter {name!r} cannot be read again: ask the admin to load it again"  # no server's path
                    deltas += self._accounts.end_with_error(sequence, error)
        return deltas

    def schedule(self, computes: bool = True) -> Plan | None:
        """The next step's plan, or None when nothing can be done before a started plan ends. One that does not compute
        saves what cannot wait."""
        self._builder.clear()
        if computes:
            self._schedule_step()
        started = self._builder.build(saves_now=not computes)
        if started is None:
            return None
        started.was_alone = not self._started
        self._started[started.plan.number] = started
        return started.plan

    def _schedule_step(self) -> None:
        suspects = [s for queue in (self.roster.waiting, self.roster.running) for s in queue if s.suspect]
        if suspects:
            self._schedule_alone(min(suspects, key=self.policy.rank))
        else:
            self._schedule_all()
            while not self._builder.entries and not self._started and self._preemption.preempt_paused():
                self._schedule_all()
        if self._speculation is not None:
            self._builder.min_chance = self._speculation.min_chance
            self._builder.ahead = self._speculation.choose_ahead(len(self._builder.entries))
            self._builder.draft_price = self._speculation.ahead.price

    def commit(self, plan: Plan, result: Result) -> list[Delta]:
        """Account for a plan that has ended; plans end in the order they were started."""
        started = self._started.pop(plan.number)
        if self._speculation is not None and plan.rows and not result.lost:
            self._speculation.note(plan, result, started.was_alone)
        if self._prompt_cap is not None and plan.rows and result.error is None and not result.lost:
            num_decode = len(plan.rows) - started.num_prompt_rows
            self._prompt_cap.note(num_decode, started.num_prompt_tokens, result.step_s)
        return self._accounts.settle(started, result)

    def check(self) -> None:
        """Everything that must hold between steps."""
        self.roster.check()
        for sequence in self.roster.running:
            self._fast_path.check(sequence)

    def _schedule_all(self) -> None:
        if self.policy.displaces:
            self._queue.displace()
        if self._shares.is_contested and self.roster.waiting and self.roster.rows and not self._capacity.reserve:
            self._queue.reclaim()
            self._queue.reclaim_slot()
        if self._speculation is not None:
            self._cut_drafts(self._speculation)
            if self._exact_starts and self._must_all_wait(self._speculation):
                return
        preemptions = self.stats.num_preemptions
        budget = self._schedule_running(self.max_num_batched_tokens)
        if self.stats.num_preemptions == preemptions:
            self._queue.admit_all(budget)

    def _must_all_wait(self, speculation: SpeculationController) -> bool:
        """True if nothing is to be planned before a plan ends, since drafts wait or are being verified. A model's came
        when no plan was under way. Where rows wait for their own plans alone, drafts not worth that are dropped."""
        drafting = [s for s in self.roster.running if s.draft]
        verified = [entry.row.draft for started in self._started.values() for entry in started.entries]
        gains = [sum(compute_path_chances(draft)) for draft in [*(s.draft for s in drafting), *verified] if draft]
        if not gains:
            return False
        are_models = any(s.draft[0].drafter in MODEL_METHODS for s in drafting)
        if are_models or speculation.all_wait(len(self.roster.running), gains):
            return bool(self._started)
        for sequence, gain in zip(drafting, gains):
            sequence.draft = sequence.draft if gain > MIN_GAIN else []
        return False

    def _cut_drafts(self, speculation: SpeculationController) -> None:
        """Keep the draft tokens that are worth verifying. They come after one token for every row, and none are kept
        while blocks are scarce."""
        running = self.roster.running
        drafting = [s for s in running if s.draft]
        if not drafting:
            return
        for sequence in drafting:
            if not self._builder.can_plan_tree(sequence):
                sequence.draft = take_line(sequence.draft)
        num_blocks = len(self.cache.groups) * sum(1 + len(s.draft) // self.cache.block_size for s in drafting)
        is_scarce = self.cache.num_available < 2 * self._capacity.growth() + max(MIN_SPARE_BLOCKS, num_blocks)
        room = 0 if is_scarce else self.max_num_batched_tokens - len(running)
        is_mixed = bool(self.roster.waiting and self.roster.rows) or any(s.remaining > 1 for s in running)
        counts = speculation.choose([s.draft for s in drafting], len(running), max(0, room), is_mixed)
        for sequence, count in zip(drafting, counts):
            sequence.draft = keep_likeliest(sequence.draft, count)

    def _schedule_running(self, budget: int) -> int:
        """Best rank first for memory; what decoding rows need is kept back from longer ones. Returns what is left."""
        budget, running = self._schedule_decode(budget, list_ready(self.roster.running, self.num_batches))
        wants = {s: self._builder.count_wanted(s) for s in running}
        short = {s: n for s, n in wants.items() if n and n <= 1 + len(s.draft)}
        kept = sum(short.values())
        if self._prompt_cap is not None:
            backlog = sum(wants.values()) - kept
            budget = min(budget, kept + self._cap_prompts(self._prompt_cap, len(short), backlog))
        for sequence in self._order_running(wants):
            kept -= short.get(sequence, 0)
            count = min(wants[sequence], budget if sequence in short else budget - kept)
            if sequence.status is not Status.RUNNING or count <= 0:
                continue
            count = self._preemption.make_room(sequence, count)
            if count:
                self._builder.add(sequence, count)
                budget -= count
        return budget

    def _cap_prompts(self, prompt_cap: PromptCap, num_short: int, backlog: int) -> int:
        """Return how many prompt tokens the step may have. `backlog`: those of running sequences. An embedding is
        computed in one step, so none are held back while one waits."""
        waiting = self.roster.waiting
        backlog += sum(len(s.tokens) for s in waiting[: len(self.roster.rows)])
        cap = None
        if backlog and not any(s.request.pool for s in waiting):
            cap = prompt_cap.choose(len(self._builder.entries) + num_short, backlog)
        return self.max_num_batched_tokens if cap is None else cap

    def _order_running(self, wants: dict[Sequence, int]) -> list[Sequence]:
        """By rank; where blocks may run out, tenants within their shares come before the others."""
        ranked = sorted(wants, key=self.policy.rank)
        if not self._shares.is_contested:
            return ranked
        most = len(self.cache.groups) * sum(count // self.cache.block_size + 2 for count in wants.values())
        return ranked if self.cache.num_available >= most else self._shares.order_running(ranked)

    def _schedule_decode(self, budget: int, running: list[Sequence]) -> tuple[int, list[Sequence]]:
        """Plan the rows of the decode fast path; returns the budget left and the sequences that need full planning:
        all of them if blocks may run out, so that their rank decides."""
        builder = self._builder
        most = len(self.cache.groups) * (len(running) + budget // self.cache.block_size + 1)
        if len(running) > budget or self.cache.num_available < most:
            return budget, running
        others, entries, number, plan_row = [], builder.entries, builder.number, self._fast_path.plan_row
        for sequence in running:
            row = plan_row(sequence, number)
            if row is None:
                others.append(sequence)
            else:
                entries.append(Entry(sequence, row, sequence.epoch))
        return budget - len(running) + len(others), others

    def _schedule_alone(self, suspect: Sequence) -> None:
        """A plan of one row, for a sequence that was part of a failed step; whoever is in its way gives way."""
        if self._started:
            return
        while not self._builder.entries:
            if suspect.status is Status.RUNNING:
                self.cache.trim(suspect.held, suspect.settled)
                count = self._preemption.fit(
                    suspect, min(self._builder.count_wanted(suspect), self.max_num_batched_tokens)
                )
                if count:
                    self._builder.add(suspect, count)
            elif self.roster.rows:
                if self._queue.claim_slot(suspect):
                    self._queue.admit(suspect, self.max_num_batched_tokens, alone=True)
                elif self.roster.loras.is_loading:
                    return  # no other sequence blocks it
            others = [s for s in self.roster.running if s is not suspect]
            if self._builder.entries or not others:
                return
            victim = self._preemption.find_victim(others) or others[-1]
            self.roster.preempt(victim, "a request that failed a step ran alone", suspect.request.tenant)
