"""Whether there is memory for one more sequence, and what the running ones may still ask for."""

from __future__ import annotations

from penstock.cache.kv import KVCache
from penstock.engine.roster import Roster
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
        """Refuse what could not even run alone."""
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
        """Whether a sequence that already holds its prefix leaves the running ones room."""
        if not self.roster.running:
            return True
        if self.reserve:
            return self.spares(self._outstanding(sequence))
        return self.spares(max(0, self.near_blocks(sequence) - self.cache.held(sequence.held)))

    def spares(self, num_blocks: int) -> bool:
        """Whether so many blocks can be had without taking from the running sequences what they will ask for."""
        owed = sum(self._outstanding(other) for other in self.roster.running) if self.reserve else self.growth()
        return self.cache.num_available - owed >= num_blocks

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could be admitted, counting no prefix of it as cached."""
        if not self.roster.rows or not self.roster.running:
            return bool(self.roster.rows)
        return self.cache.num_available - self.growth() >= self.near_blocks(sequence)

    def growth(self) -> int:
        """Blocks the running sequences may take next: one for each table."""
        return len(self.roster.running) * len(self.cache.groups)

    def near_blocks(self, sequence: Sequence) -> int:
        """Blocks for its tokens and some more: the more, the oftener it was preempted, so that this stays rare."""
        ahead = self.cache.block_size << min(sequence.num_preempted, 20) if sequence.num_preempted else 1
        length = min(sequence.limit, len(sequence.tokens) + ahead)
        return self.cache.blocks_to(length, min(self.max_num_batched_tokens, len(sequence.tokens)))

    def _outstanding(self, sequence: Sequence) -> int:
        """Blocks a sequence may still ask for until its end, a copy of a shared one in each group included."""
        chunk = min(self.max_num_batched_tokens, sequence.num_prompt)
        most = self.cache.blocks_to(sequence.limit, chunk) + len(self.cache.groups)
        return max(0, most - self.cache.held(sequence.held))
