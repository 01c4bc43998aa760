"""Memory for one more sequence beside what the running ones may still ask for, and tenants' equal shares of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.cache.kv import KVCache
from penstock.engine.scheduling.roster import Roster
from penstock.engine.sequence import Sequence
from penstock.errors import InvalidRequest
from penstock.types import Request


class Capacity:
    """`reserve` admits only what fits to its end; otherwise what fits now, and preemption mends the rest."""

    def __init__(self, cache: KVCache, roster: Roster, max_num_batched_tokens: int, reserve: bool) -> None:
        self.cache = cache
        self.roster = roster
        self.max_num_batched_tokens = max_num_batched_tokens
        self.reserve = reserve

    def require_fit(self, request: Request) -> None:
        """Refuse a request that could not even run alone."""
        if request.id in self.roster.requests:
            raise InvalidRequest(f"request id {request.id!r} is in use: give each request its own")
        if not request.tokens:
            raise InvalidRequest("the prompt is empty: give at least one token")
        count = len(request.tokens)
        if request.pool and count > self.max_num_batched_tokens:
            raise InvalidRequest(
                f"the prompt has {count} tokens and must be computed in one step of at most "
                f"{self.max_num_batched_tokens}: shorten it or raise max_num_batched_tokens"
            )
        length = count if request.pool else count + request.max_tokens
        blocks = self.cache.blocks_to(length, length if request.pool else 1)
        if blocks > self.cache.pool.num_blocks:
            raise InvalidRequest(
                f"prompt and answer of {length} tokens need {blocks} cache blocks, the cache has "
                f"{self.cache.pool.num_blocks}: shorten them or raise kv_cache_tokens"
            )

    def admits(self, sequence: Sequence) -> bool:
        """True if a sequence that already holds its prefix leaves the running ones room."""
        if not self.roster.running:
            return True
        if self.reserve:
            return self.spares(self._blocks_to_end(sequence))
        return self.spares(max(0, self.near_blocks(sequence) - sequence.held.num_blocks))

    def spares(self, num_blocks: int) -> bool:
        """True if so many blocks are free beside what the running sequences will ask for."""
        owed = sum(self._blocks_to_end(other) for other in self.roster.running) if self.reserve else self.growth()
        return self.cache.num_available - owed >= num_blocks

    def has_room(self, sequence: Sequence) -> bool:
        """True if a waiting sequence could be admitted, counting no prefix of it as cached."""
        if not self.roster.rows or not self.roster.running:
            return bool(self.roster.rows)
        return self.cache.num_available - self.growth() >= self.near_blocks(sequence)

    def growth(self) -> int:
        """Blocks the running sequences may take next: one for each table."""
        return len(self.roster.running) * len(self.cache.groups)

    def near_blocks(self, sequence: Sequence) -> int:
        """Blocks for its tokens and some headroom, which doubles per preemption, to avoid thrashing."""
        ahead = self.cache.block_size << min(sequence.num_preempted, 20) if sequence.num_preempted else 1
        length = min(sequence.limit, len(sequence.tokens) + ahead)
        return self.cache.blocks_to(length, min(self.max_num_batched_tokens, len(sequence.tokens)))

    def _blocks_to_end(self, sequence: Sequence) -> int:
        """Blocks a sequence may still ask for until its end, a copy of a shared one in each group included."""
        chunk = min(self.max_num_batched_tokens, sequence.num_prompt)
        most = self.cache.blocks_to(sequence.limit, chunk) + len(self.cache.groups)
        return max(0, most - sequence.held.num_blocks)


Rank = Callable[[Sequence], tuple[int, ...]]


class Shares:
    """A tenant may fill the cache while no other needs it. One at or below its share loses nothing to another that
    is above its own, and takes what it needs from the one that holds the most."""

    def __init__(self, cache: KVCache, roster: Roster, rank: Rank) -> None:
        self.cache = cache
        self.roster = roster
        self.rank = rank

    @property
    def is_contested(self) -> bool:
        """True while more than one tenant has requests. Everything else here walks over the blocks in use."""
        return len(self.roster.tenants) > 1

    @property
    def share(self) -> float:
        return self.cache.pool.num_blocks / len(self.roster.tenants)

    def usage(self) -> dict[str, int]:
        """Blocks that each tenant holds; one that several of its sequences share counts once."""
        blocks: dict[str, set[int]] = {}
        for sequence in self.roster.running:
            own, holding = blocks.setdefault(sequence.request.tenant, set()), sequence.held
            for table, first in zip(holding.tables, holding.first):
                own.update(table[first:] if first else table)
        return {tenant: len(own) for tenant, own in blocks.items()}

    def above(self, usage: dict[str, int]) -> set[str]:
        return {tenant for tenant, count in usage.items() if count > self.share}

    def order_running(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Sort sequences of tenants within their shares first."""
        above = self.above(self.usage())
        return sorted(sequences, key=lambda sequence: sequence.request.tenant in above)

    def order_waiting(self, order: list[Sequence], near: Callable[[Sequence], int]) -> list[Sequence]:
        """Order waiting sequences; put tenants that would exceed their share last, unless nothing of theirs runs."""
        usage = self.usage()
        heads = {sequence.request.tenant: sequence for sequence in reversed(order)}
        later = {name for name, head in heads.items() if name in usage and usage[name] + near(head) > self.share}
        return sorted(order, key=lambda sequence: sequence.request.tenant in later)

    def find_candidates(self, needy: Sequence) -> list[list[Sequence]]:
        """Running sequences that may be preempted for one that needs blocks, by tenant, the largest holder first."""
        rank, tenant, running = self.rank(needy), needy.request.tenant, self.roster.running
        worse = [s for s in running if self.rank(s) > rank]
        usage = self.usage() if self.is_contested else {}
        above = self.above(usage)
        if not above:
            return [worse]
        candidates = []
        for name in sorted(above | {tenant}, key=lambda name: (-usage[name], name)):
            if name == tenant or usage[name] >= usage[tenant]:  # among equals the rank decides, lest all wait
                some = running if usage[name] > usage[tenant] else worse
                candidates.append([s for s in some if s.request.tenant == name])
        return candidates

    def find_over_share(self, waiting: Sequence, num_blocks: int) -> list[Sequence]:
        """Running sequences of the tenant most above its share, if the waiting one stays within its own with so many
        blocks more."""
        usage, tenant = self.usage(), waiting.request.tenant
        most = max(usage, key=lambda name: (usage[name], name), default=tenant)
        if usage.get(tenant, 0) + num_blocks > self.share or usage.get(most, 0) <= self.share:
            return []
        over_share = [s for s in self.roster.running if s.request.tenant == most]
        return over_share if len(over_share) > 1 else []  # the last one goes on, so that no tenant starves

    def find_protected(self, head: Sequence, num_blocks: int) -> set[str]:
        """Tenants that lose nothing to a waiting sequence that takes `num_blocks`, whatever its priority."""
        if not self.is_contested:
            return set()
        usage, tenant = self.usage(), head.request.tenant
        usage[tenant] = usage.get(tenant, 0) + num_blocks
        above = self.above(usage)
        return usage.keys() - above - {tenant} if above else set()
