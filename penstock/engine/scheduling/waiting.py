"""Sequences that wait: in which order they are admitted, and whom they or running ones preempt."""

from __future__ import annotations

from collections import Counter

from penstock.cache.holding import Holding
from penstock.cache.kv import KVCache
from penstock.engine.scheduling.accounts import Stats
from penstock.engine.scheduling.capacity import Capacity, Shares
from penstock.engine.scheduling.plan_builder import PlanBuilder
from penstock.engine.scheduling.policy import Policy
from penstock.engine.scheduling.roster import Roster
from penstock.engine.sequence import Sequence

MAX_OVERTAKEN = 64  # times that a sequence is overtaken by those whose adapters hold slots
OTHERS_COUNT = 16  # that one of another tenant counts for


class Preemption:
    def __init__(
        self, cache: KVCache, roster: Roster, shares: Shares, policy: Policy, builder: PlanBuilder, stats: Stats
    ) -> None:
        self.cache, self.roster, self.shares = cache, roster, shares
        self.policy, self.builder, self.stats = policy, builder, stats

    def make_room(self, sequence: Sequence, count: int) -> int:
        """Count the positions, up to `count`, for which there are blocks: by eviction, by a shorter chunk, at last by
        preempting another."""
        self.cache.trim(sequence.held, sequence.settled)
        while True:
            fitting = self.fit(sequence, count)
            if fitting or self.cache.pool.num_limbo:
                return fitting
            victim = next(filter(None, map(self.find_victim, self.shares.find_candidates(sequence))), None)
            if victim is None:
                return 0
            self.preempt(victim, "its blocks were needed", sequence.request.tenant)

    def fit(self, sequence: Sequence, count: int) -> int:
        """Pick the longest of count, count/2, … for which there are blocks; 0 if not even one position fits."""
        while count:
            needed = self.cache.count_needed(sequence.held, sequence.certain, sequence.computed + count)
            if self.cache.ensure(needed):
                return count
            count = 0 if sequence.request.pool else count // 2
        return 0

    def find_victim(self, candidates: list[Sequence]) -> Sequence | None:
        """Pick the victim losing least work; prefer those that free blocks."""
        taken = {entry.sequence for entry in self.builder.entries}
        losses = {s: self.cache.count_exclusive(s.held) for s in candidates if s not in taken}
        return min(
            losses, default=None, key=lambda s: (not losses[s], losses[s], tuple(-part for part in self.policy.rank(s)))
        )

    def preempt(self, victim: Sequence, why: str = "", tenant: str = "") -> None:
        """Preempt, and note why and for whose request."""
        self.stats.num_preemptions += 1
        victim.num_preempted += 1
        self.roster.preempt(victim, why, tenant)

    def preempt_paused(self) -> bool:
        """Preempt a beam that waits for the others of its group: it keeps its candidates, not its row and blocks."""
        paused = [s for s in self.roster.running if s.candidates]
        if not paused:
            return False
        self.preempt(paused[-1], "it waited for other beams", paused[-1].request.tenant)
        return True


class WaitingQueue:
    def __init__(
        self,
        cache: KVCache,
        roster: Roster,
        capacity: Capacity,
        shares: Shares,
        policy: Policy,
        builder: PlanBuilder,
        preemption: Preemption,
        stats: Stats,
    ) -> None:
        self.cache, self.roster, self.capacity, self.shares = cache, roster, capacity, shares
        self.policy, self.builder, self.preemption, self.stats = policy, builder, preemption, stats
        self._heir: Sequence | None = None  # others were preempted for it: if it waits, it goes first

    def admit_all(self, budget: int) -> None:
        """Admit in policy order; stop at the first that does not fit. One without an adapter slot may be overtaken
        until overdue."""
        if not self.roster.waiting:
            return
        if budget <= 0 or not self.roster.rows:
            return self._note_full()
        self.roster.loras.begin()
        overtaken: list[Sequence] = []
        for sequence in self._order():
            if budget <= 0 or not self.roster.rows:
                return self._note_full()
            if not self._claim(sequence, sequence is self._heir or sequence.overtaken >= MAX_OVERTAKEN):
                self.roster.journal.block("all slots for adapters were taken")
                overtaken.append(sequence)
                continue
            if self._is_deferred(sequence):
                self.roster.journal.block("another request was computing its prefix")
                continue
            count = self.admit(sequence, budget)
            if not count:
                return
            budget -= count
            for other in overtaken:
                other.overtaken += _weigh(other, sequence)
            for other in self.roster.waiting if self.policy.overtakes else ():
                other.passed += other.number < sequence.number

    def _note_full(self) -> None:
        full = "the step had its most tokens" if self.roster.rows else "all rows were taken"
        self.roster.journal.block(full)

    def claim_slot(self, sequence: Sequence) -> bool:
        """Find a slot for the adapters of a sequence that is to run alone."""
        self.roster.loras.begin()
        return self._claim(sequence, is_overdue=True)

    def _claim(self, sequence: Sequence, is_overdue: bool) -> bool:
        return self.roster.loras.claim(sequence.root.adapter, sequence.request.loras, is_overdue)

    def admit(self, sequence: Sequence, budget: int, alone: bool = False, cold: bool = False) -> int:
        """Give the sequence a row and its first tokens of this step; 0 if there is no room for it now."""
        self.cache.loads.begin()
        holding, hit, forked = self._begin(sequence, cold)
        sequence.holding, sequence.computed = holding, hit
        count = self.builder.cut_at_snapshot(sequence, min(len(sequence.tokens) - hit, budget))
        whole = not sequence.request.pool or count == len(sequence.tokens)
        if not whole or not (alone or self.capacity.admits(sequence)):
            count = 0
        count = self.preemption.fit(sequence, count)
        if not count:
            self.cache.release(holding)
            self.cache.loads.cancel()
            sequence.holding, sequence.computed = None, 0
            self.roster.journal.block("there were not enough free blocks")
            # Its own prefix may be what fills the cache: a snapshot and the state resumed from it, both at once.
            retry = hit and not self.roster.running and not self.cache.pool.num_limbo
            return self.admit(sequence, budget, alone, cold=True) if retry else 0
        self.roster.run(sequence, holding, hit)
        if sequence.num_cached is None:
            sequence.num_cached = hit
            self.stats.num_prompt_tokens += sequence.num_prompt
        self.stats.num_cached_tokens += 0 if forked else hit
        self.stats.num_restored_tokens += holding.num_restored
        self.stats.num_forks += forked
        if self.cache.enable_prefix_caching and not sequence.request.pool:
            self.roster.prefixes.announce(sequence)
        self.builder.add(sequence, count)
        return count

    def _begin(self, sequence: Sequence, cold: bool) -> tuple[Holding, int, bool]:
        """Make a holding with as much of its state as exists, that length, and whether a sibling's is shared."""
        leader, last = sequence.leader, sequence.num_prompt - 1
        if leader is not None and leader.holding is not None and leader.settled >= last and sequence.num_output == 0:
            child = self.cache.fork(leader.holding, last, at_end=leader.computed == last)
            if child is not None:
                return child, last, True
        tokens = sequence.tokens if self._reads_cache(sequence) and not cold else []
        holding, hit = self.cache.attach(sequence.root, tokens, self.builder.number)
        return holding, hit, False

    def _order(self) -> list[Sequence]:
        """By policy; with several tenants, those that would go above their shares last."""
        order = self.policy.order(self.roster.waiting, self._match)
        if not self.shares.is_contested:
            return order
        order = self.shares.order_waiting(order, self.capacity.near_blocks)
        return sorted(order, key=lambda sequence: sequence is not self._heir)

    def _reads_cache(self, sequence: Sequence) -> bool:
        return not (sequence.request.pool or sequence.wants_prompt_logprobs)

    def _match(self, sequence: Sequence) -> int:
        return self.cache.match(sequence.root, sequence.tokens) if self._reads_cache(sequence) else 0

    def _is_deferred(self, sequence: Sequence) -> bool:
        """True if it cannot run, for want of its adapters, or if waiting a little saves work: its prompt, or the next
        block of it, is being computed by another."""
        if sequence.candidates or not self.roster.loras.can_run(sequence.root.adapter):
            return True
        leader = sequence.leader
        if leader is not None and not leader.done and leader.num_output == 0 and leader.settled < leader.num_prompt - 1:
            return True
        if not self._reads_cache(sequence) or not self.cache.enable_prefix_caching:
            return False
        prefixes = self.roster.prefixes
        if prefixes.is_still_awaited(sequence):
            return True
        hit, chain = self._match(sequence), self.cache.chain(sequence.root, sequence.tokens)
        return prefixes.is_awaited(sequence, hit, chain)

    def displace(self) -> None:
        """Preempt running sequences of worse priority for the first waiting one."""
        head = next((s for s in self._order() if not self._is_deferred(s)), None)
        while head is not None and not self.capacity.has_room(head) and not self.cache.pool.num_limbo:
            protected = self.shares.find_protected(head, self.capacity.near_blocks(head))
            worse = [s for s in self.roster.running if s.request.priority > head.request.priority]
            worse = [s for s in worse if s.request.tenant not in protected] if protected else worse
            worst = max((s.request.priority for s in worse), default=0)
            victims = [s for s in worse if s.request.priority == worst]
            victim = self.preemption.find_victim(victims) or (victims[-1] if victims and not self.roster.rows else None)
            if victim is None:
                return
            self.preemption.preempt(victim, "better priority came first", head.request.tenant)
            self._heir = head

    def reclaim(self) -> None:
        """Preempt sequences of tenants above their shares for the first waiting one of a tenant within its own."""
        head = next((s for s in self._order() if not self._is_deferred(s)), None)
        while head is not None and not self.capacity.has_room(head) and not self.cache.pool.num_limbo:
            victim = self.preemption.find_victim(self.shares.find_over_share(head, self.capacity.near_blocks(head)))
            if victim is None:
                return
            self.preemption.preempt(victim, "its tenant was above its share", head.request.tenant)
            self._heir = head

    def reclaim_slot(self) -> None:
        """Empty a slot of a tenant that has more of them than its share, for a sequence of one within its own."""
        users: dict[str, list[Sequence]] = {}
        for sequence in self.roster.running if self.roster.loras.slots else ():
            if sequence.root.adapter:
                users.setdefault(sequence.root.adapter, []).append(sequence)
        waiting = {s for s in self.roster.waiting if s.root.adapter and s.root.adapter not in users}
        if not users or not waiting:
            return
        owners = {key: {s.request.tenant for s in some} for key, some in users.items()}
        held = Counter(tenant for tenants in owners.values() for tenant in tenants)
        num_slots = len(self.roster.loras.slots)
        share = max(1.0, num_slots / len(held.keys() | {s.request.tenant for s in waiting}))
        head = next((s for s in self._order() if s in waiting and held[s.request.tenant] + 1 <= share), None)
        if head is None:
            return
        self._heir = head
        above = {tenant for tenant, count in held.items() if count > share}
        over_share = [some for key, some in users.items() if owners[key] <= above] if len(users) == num_slots else []
        for victim in min(over_share, default=[], key=len):
            why = "its tenant was above its share of the slots for adapters"
            self.preemption.preempt(victim, why, head.request.tenant)


def _weigh(waiting: Sequence, admitted: Sequence) -> int:
    """Return how much being overtaken by another counts, of MAX_OVERTAKEN."""
    if waiting.request.priority < admitted.request.priority:
        return MAX_OVERTAKEN
    return 1 if waiting.request.tenant == admitted.request.tenant else OTHERS_COUNT
