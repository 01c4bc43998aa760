"""Each step every sequence gets a count of tokens out of one budget. Decode, prefill, chunk, verify: all the same."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from penstock.cache.kv import Holding, KVCache
from penstock.engine.accounts import Accounts, Entry, Started
from penstock.engine.beam import BeamGroup
from penstock.engine.capacity import Capacity
from penstock.engine.plan import Admission, Draft, Move, Output, Plan, Result, Row
from penstock.engine.policy import make_policy
from penstock.engine.roster import Roster
from penstock.engine.sequence import Flight, Sequence, Status
from penstock.engine.shares import Shares
from penstock.engine.snapshots import is_snapshot, next_snapshot
from penstock.engine.stats import Stats
from penstock.engine.steady import Steady
from penstock.errors import InvalidConfig, InvalidRequest
from penstock.types import Delta, Request


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
    ) -> None:
        if capacity not in ("ondemand", "reserve"):
            raise InvalidConfig(f"capacity={capacity!r} is unknown: choose ondemand or reserve")
        self.cache = cache
        self.policy = make_policy(policy)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stats = Stats()
        self.roster = Roster(cache, max_num_seqs)
        self._capacity = Capacity(cache, self.roster, max_num_batched_tokens, capacity == "reserve")
        self._shares = Shares(cache, self.roster, self.policy.rank)
        self._steady = Steady(cache)
        self._accounts = Accounts(cache, self.roster, self.stats, self._steady)
        self._heir: Sequence | None = None  # others were preempted for it: if it waits, it goes first
        self._arrivals = 0
        self._plans = 0
        self._started: dict[int, Started] = {}
        self._entries: list[Entry] = []  # of the plan being made
        self._enlisted: list[Sequence] = []  # whose entries were made with a full look
        self._admissions: list[Admission] = []

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
        except InvalidRequest:
            self.stats.num_refused += 1
            raise
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

    def schedule(self) -> Plan | None:
        """The next step's plan, or None when nothing can be done before a started plan ends."""
        self._entries, self._enlisted, self._admissions = [], [], []
        suspects = [s for queue in (self.roster.waiting, self.roster.running) for s in queue if s.suspect]
        if suspects:
            self._schedule_alone(min(suspects, key=self.policy.rank))
        else:
            self._schedule_all()
            while not self._entries and not self._started and self._preempt_paused():
                self._schedule_all()
        return self._make_plan()

    def commit(self, plan: Plan, result: Result) -> list[Delta]:
        """Account for a plan that has ended; plans end in the order they were started."""
        return self._accounts.settle(self._started.pop(plan.number), result)

    def check(self) -> None:
        """Everything that must hold between steps."""
        self.roster.check()
        for sequence in self.roster.running:
            self._steady.check(sequence)

    def _make_plan(self) -> Plan | None:
        if not self._entries:
            return None
        copies, self.cache.copies = self.cache.copies, []
        plan = Plan(
            self._plans,
            tuple(entry.row for entry in self._entries),
            tuple(self._admissions),
            tuple(Move(copy.source, copy.target) for copy in copies),
        )
        for sequence in self._enlisted:
            self._share(sequence)
        self._started[plan.number] = Started(plan, self._entries, [copy.holding for copy in copies])
        self._plans += 1
        self.stats.num_steps += 1
        self.stats.max_batch_size = max(self.stats.max_batch_size, len(plan.rows))
        self.stats.num_computed_tokens += plan.num_tokens
        return plan

    def _schedule_all(self) -> None:
        if self.policy.displaces:
            self._displace()
        if self._shares.is_contested and self.roster.waiting and self.roster.rows and not self._capacity.reserve:
            self._reclaim()
        preemptions = self.stats.num_preemptions
        budget = self._schedule_running(self.max_num_batched_tokens)
        if self.stats.num_preemptions == preemptions:
            self._admit_waiting(budget)

    def _schedule_running(self, budget: int) -> int:
        """Best rank first for memory; what decoding rows need is kept back from longer ones. Returns what is left."""
        budget, running = self._go_on(budget)
        wants = {s: self._want(s) for s in running}
        short = {s: n for s, n in wants.items() if n and n <= 1 + len(s.draft)}
        kept = sum(short.values())
        for sequence in self._order_running(wants):
            kept -= short.get(sequence, 0)
            count = min(wants[sequence], budget if sequence in short else budget - kept)
            if sequence.status is not Status.RUNNING or count <= 0:
                continue
            count = self._make_room(sequence, count)
            if count:
                self._enlist(sequence, count)
                budget -= count
        return budget

    def _order_running(self, wants: dict[Sequence, int]) -> list[Sequence]:
        """By rank; where blocks may run out, tenants within their shares come before the others."""
        ranked = sorted(wants, key=self.policy.rank)
        if not self._shares.is_contested:
            return ranked
        most = len(self.cache.groups) * sum(count // self.cache.block_size + 2 for count in wants.values())
        return ranked if self.cache.num_available >= most else self._shares.order_running(ranked)

    def _go_on(self, budget: int) -> tuple[int, list[Sequence]]:
        """Sequences that go on by one token into room they have. What is left of the budget, and the others. Where a
        step may need more than there is, their rank decides about all."""
        running = self.roster.running
        most = len(self.cache.groups) * (len(running) + budget // self.cache.block_size + 1)
        if len(running) > budget or self.cache.num_available < most:
            return budget, running
        others = []
        for sequence in running:
            row = self._steady.row(sequence, self._plans)
            if row is None:
                others.append(sequence)
            else:
                self._entries.append(Entry(sequence, row, sequence.epoch))
        return budget - len(running) + len(others), others

    def _want(self, sequence: Sequence) -> int:
        """How many positions the sequence could compute in this step, budget and memory aside."""
        if sequence.expected and len(sequence.tokens) + sequence.expected >= sequence.limit:
            return 0
        return self._cut_at_snapshot(sequence, sequence.remaining + len(self._guesses(sequence)))

    def _guesses(self, sequence: Sequence) -> tuple[Draft, ...]:
        """Guesses that follow what unfinished plans may append: only a line, never with a state that cannot go back."""
        if not sequence.draft:
            return ()
        most = sequence.limit - len(sequence.tokens) - sequence.expected - 1
        if not sequence.draft or self.cache.recurrent or most <= 0:
            return ()
        line = [draft.token for i, draft in enumerate(sequence.draft) if draft.parent == i - 1]
        return tuple(Draft(token, i - 1) for i, token in enumerate(line[sequence.expected :][:most]))

    def _cut_at_snapshot(self, sequence: Sequence, count: int) -> int:
        if not self.cache.recurrent or sequence.request.pool:
            return count
        return min(count, next_snapshot(sequence, self.cache.block_size) - sequence.computed)

    def _make_room(self, sequence: Sequence, count: int) -> int:
        """Blocks for up to `count` positions: by eviction, by a shorter chunk, at last by preempting another."""
        self.cache.trim(sequence.held, sequence.settled)
        while True:
            fitting = self._fitting(sequence, count)
            if fitting or self.cache.pool.num_limbo:
                return fitting
            victim = next(filter(None, map(self._victim, self._shares.find_candidates(sequence))), None)
            if victim is None:
                return 0
            self._preempt(victim)

    def _fitting(self, sequence: Sequence, count: int) -> int:
        """The longest of count, count/2, … for which there are blocks; 0 if not even one position fits."""
        while count:
            needed = self.cache.needed(sequence.held, sequence.certain, sequence.computed + count)
            if self.cache.ensure(needed):
                return count
            count = 0 if sequence.request.pool else count // 2
        return 0

    def _victim(self, candidates: list[Sequence]) -> Sequence | None:
        """The one that loses the least work; one that would free nothing only where all share what they hold."""
        taken = {entry.sequence for entry in self._entries}
        losses = {s: self.cache.exclusive(s.held) for s in candidates if s not in taken}
        return min(
            losses, default=None, key=lambda s: (not losses[s], losses[s], tuple(-part for part in self.policy.rank(s)))
        )

    def _preempt(self, victim: Sequence) -> None:
        self.stats.num_preemptions += 1
        victim.num_preempted += 1
        self.roster.preempt(victim)

    def _preempt_paused(self) -> bool:
        """A beam that waits for the others of its group keeps its candidates, not its row and blocks."""
        paused = [s for s in self.roster.running if s.candidates]
        if not paused:
            return False
        self._preempt(paused[-1])
        return True

    def _enlist(self, sequence: Sequence, count: int) -> None:
        """Put the sequence's next `count` positions into the plan."""
        holding, start, end = sequence.held, sequence.computed, sequence.computed + count
        state_at_start = bool(self.cache.recurrent and holding.tables[self.cache.recurrent[0]])
        self.cache.grow(holding, sequence.certain, end, self._plans)
        if (
            state_at_start
            and is_snapshot(sequence, start, self.cache.block_size)
            and self._capacity.spares(self.cache.state_blocks)
        ):
            self.cache.snapshot(holding, start, self._plans)
        known = len(sequence.tokens) + sequence.expected
        draft = self._guesses(sequence)[: max(0, end - known)]
        output = Output.NONE
        if end >= known:
            output = Output.POOL if sequence.request.pool else Output.SAMPLE
        if not sequence.admitted:
            tokens = tuple(sequence.tokens) if sequence.num_output else sequence.request.tokens
            self._admissions.append(Admission(sequence.row, sequence.request, sequence.sibling, tokens, sequence.mu))
            sequence.admitted = True
            sequence.chosen = []
        row = Row(
            sequence.row,
            start,
            count,
            output,
            self.cache.changes(holding),
            tuple(sequence.chosen),
            draft,
            prompt_logprobs=sequence.wants_prompt_logprobs and start < sequence.num_prompt - 1,
        )
        sequence.chosen, sequence.draft = [], []
        expected = 1 + len(draft) if output is Output.SAMPLE and not sequence.beam else 0
        sequence.flights.append(Flight(count, expected))
        sequence.computed = end
        self.stats.num_draft_tokens += len(draft)
        self._entries.append(Entry(sequence, row, sequence.epoch))
        self._enlisted.append(sequence)

    def _share(self, sequence: Sequence) -> None:
        """Plans run in the order in which they are started, so whole blocks of known tokens are in the tree for the
        next plan, whether or not this one has ended by then. Rows of the same plan never read them: a runner may
        compute its rows in any order. A recurrent state is of use with its snapshot only, which is kept at the end."""
        if not self.cache.recurrent:
            holding = sequence.held
            self.cache.insert(holding, sequence.tokens, min(sequence.certain, len(sequence.tokens)), self._plans)
            if sequence.keys:
                self.roster.prefixes.progress(sequence, holding.num_inserted)

    def _admit_waiting(self, budget: int) -> None:
        """In the policy's order; the first that finds no room stops the rest, so that it is not passed for ever."""
        if budget <= 0 or not self.roster.rows or not self.roster.waiting:
            return
        for sequence in self._order_waiting():
            if budget <= 0 or not self.roster.rows:
                return
            if self._deferred(sequence):
                continue
            count = self._admit(sequence, budget)
            if not count:
                return
            budget -= count
            for other in self.roster.waiting if self.policy.overtakes else ():
                other.passed += other.number < sequence.number

    def _order_waiting(self) -> list[Sequence]:
        """By policy; with several tenants, those that would go above their shares last."""
        order = self.policy.order(self.roster.waiting, self._match)
        if not self._shares.is_contested:
            return order
        order = self._shares.order_waiting(order, self._capacity.near_blocks)
        return sorted(order, key=lambda sequence: sequence is not self._heir)

    def _reads_cache(self, sequence: Sequence) -> bool:
        return not (sequence.request.pool or sequence.wants_prompt_logprobs)

    def _match(self, sequence: Sequence) -> int:
        return self.cache.match(sequence.salt, sequence.tokens) if self._reads_cache(sequence) else 0

    def _deferred(self, sequence: Sequence) -> bool:
        """Whether waiting a little saves work: its prompt, or the next block of it, is being computed by another."""
        if sequence.candidates:
            return True
        leader = sequence.leader
        if leader is not None and not leader.done and leader.num_output == 0 and leader.settled < leader.num_prompt - 1:
            return True
        if not self._reads_cache(sequence) or not self.cache.enable_prefix_caching:
            return False
        prefixes = self.roster.prefixes
        if prefixes.still_awaited(sequence):
            return True
        hit, chain = self._match(sequence), self.cache.chain(sequence.salt, sequence.tokens)
        return prefixes.awaited(sequence, hit, chain)

    def _admit(self, sequence: Sequence, budget: int, alone: bool = False, cold: bool = False) -> int:
        """Give the sequence a row and its first tokens of this step; 0 if there is no room for it now."""
        holding, hit, forked = self._begin(sequence, cold)
        sequence.holding, sequence.computed = holding, hit
        count = self._cut_at_snapshot(sequence, min(len(sequence.tokens) - hit, budget))
        whole = not sequence.request.pool or count == len(sequence.tokens)
        if not whole or not (alone or self._capacity.admits(sequence)):
            count = 0
        count = self._fitting(sequence, count)
        if not count:
            self.cache.release(holding)
            sequence.holding, sequence.computed = None, 0
            # Its own prefix may be what fills the cache: a snapshot and the state resumed from it, both at once.
            retry = hit and not self.roster.running and not self.cache.pool.num_limbo
            return self._admit(sequence, budget, alone, cold=True) if retry else 0
        self.roster.run(sequence, holding, hit)
        if sequence.num_cached is None:
            sequence.num_cached = hit
            self.stats.num_prompt_tokens += sequence.num_prompt
        self.stats.num_cached_tokens += 0 if forked else hit
        self.stats.num_forks += forked
        if self.cache.enable_prefix_caching and not sequence.request.pool:
            self.roster.prefixes.announce(sequence)
        self._enlist(sequence, count)
        return count

    def _begin(self, sequence: Sequence, cold: bool) -> tuple[Holding, int, bool]:
        """A holding with as much of its state as exists, that length, and whether it is shared with a sibling."""
        leader, last = sequence.leader, sequence.num_prompt - 1
        if leader is not None and leader.holding is not None and leader.settled >= last and sequence.num_output == 0:
            child = self.cache.fork(leader.holding, last, at_end=leader.computed == last)
            if child is not None:
                return child, last, True
        tokens = sequence.tokens if self._reads_cache(sequence) and not cold else []
        holding, hit = self.cache.attach(sequence.salt, tokens)
        return holding, hit, False

    def _displace(self) -> None:
        """Preempt running sequences of worse priority for the first waiting one."""
        head = next((s for s in self._order_waiting() if not self._deferred(s)), None)
        while head is not None and not self._capacity.has_room(head) and not self.cache.pool.num_limbo:
            protected = self._shares.find_protected(head, self._capacity.near_blocks(head))
            worse = [s for s in self.roster.running if s.request.priority > head.request.priority]
            worse = [s for s in worse if s.request.tenant not in protected] if protected else worse
            worst = max((s.request.priority for s in worse), default=0)
            victims = [s for s in worse if s.request.priority == worst]
            victim = self._victim(victims) or (victims[-1] if victims and not self.roster.rows else None)
            if victim is None:
                return
            self._preempt(victim)
            self._heir = head

    def _reclaim(self) -> None:
        """Preempt sequences of tenants above their shares for the first waiting one of a tenant within its own."""
        head = next((s for s in self._order_waiting() if not self._deferred(s)), None)
        while head is not None and not self._capacity.has_room(head) and not self.cache.pool.num_limbo:
            victim = self._victim(self._shares.find_over_share(head, self._capacity.near_blocks(head)))
            if victim is None:
                return
            self._preempt(victim)
            self._heir = head

    def _schedule_alone(self, suspect: Sequence) -> None:
        """A plan of one row, for a sequence that was part of a failed step; whoever is in its way gives way."""
        if self._started:
            return
        while not self._entries:
            if suspect.status is Status.RUNNING:
                self.cache.trim(suspect.held, suspect.settled)
                count = self._fitting(suspect, min(self._want(suspect), self.max_num_batched_tokens))
                if count:
                    self._enlist(suspect, count)
            elif self.roster.rows:
                self._admit(suspect, self.max_num_batched_tokens, alone=True)
            others = [s for s in self.roster.running if s is not suspect]
            if self._entries or not others:
                return
            self.roster.preempt(self._victim(others) or others[-1])
