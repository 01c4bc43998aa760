"""The plan being made: rows that take part, and what follows for their sequences."""

from __future__ import annotations

from penstock.cache.kv import KVCache
from penstock.engine.draft_tree import keep_likeliest, take_line
from penstock.engine.plan import Admission, Draft, Move, Output, Plan, Row
from penstock.engine.scheduling.accounts import Entry, Started, Stats
from penstock.engine.scheduling.capacity import Capacity
from penstock.engine.scheduling.roster import Roster
from penstock.engine.sequence import InFlight, Sequence


def _last_in_prompt(sequence: Sequence, block_size: int) -> int:
    """Return where the next turn of a conversation can resume."""
    return (sequence.num_prompt - 1) // block_size * block_size


def next_snapshot(sequence: Sequence, cache: KVCache) -> int:
    """Return the first such position after `computed`: a step must not run past it."""
    regular = (sequence.computed // cache.snapshot_stride + 1) * cache.snapshot_stride
    last = _last_in_prompt(sequence, cache.block_size)
    return last if sequence.computed < last < regular else regular


def is_snapshot(sequence: Sequence, position: int, cache: KVCache) -> bool:
    at_stride = position % cache.snapshot_stride == 0
    return position > 0 and (at_stride or position == _last_in_prompt(sequence, cache.block_size))


class PlanBuilder:
    """Collects the rows of one plan after the other."""

    def __init__(
        self, cache: KVCache, roster: Roster, capacity: Capacity, stats: Stats, exact_starts: bool = False
    ) -> None:
        self.cache, self.roster, self.capacity, self.stats = cache, roster, capacity, stats
        self._exact_starts = exact_starts
        self.trees = False  # the executor verifies trees of draft tokens
        self.number = 0  # of the plan being made
        self.clear()

    def clear(self) -> None:
        self.entries: list[Entry] = []
        self.min_chance: float | None = None
        self.ahead, self.draft_price = 0, 0.0
        self._shared: list[Sequence] = []  # whose new blocks enter the tree with the plan
        self._admissions: list[Admission] = []
        self._num_prompt_rows = self._num_prompt_tokens = 0

    def count_wanted(self, sequence: Sequence) -> int:
        """Count the positions that the sequence could compute in this step, budget and memory aside."""
        if self.must_wait(sequence):
            return 0
        expected = sequence.expected
        known = len(sequence.tokens) + expected
        if expected and known >= sequence.limit:
            return 0
        return self.cut_at_snapshot(sequence, known - sequence.computed + len(self._find_drafts(sequence)))

    def must_wait(self, sequence: Sequence) -> bool:
        """True if the sequence's own plans must end first: it verifies drafts, or has some that what comes of those
        plans would make stale."""
        return self._exact_starts and bool(sequence.flights) and bool(sequence.draft or sequence.verifies)

    def can_plan_tree(self, sequence: Sequence) -> bool:
        return self.trees and not sequence.flights

    def _find_drafts(self, sequence: Sequence) -> tuple[Draft, ...]:
        """Drafts after what unfinished plans may append: a tree if there are none, else a line. None with a recurrent
        state."""
        if not sequence.draft or self.cache.recurrent:
            return ()
        most = min(sequence.max_drafts, max(0, sequence.limit - len(sequence.tokens) - sequence.expected - 1))
        if self.can_plan_tree(sequence):
            return tuple(keep_likeliest(sequence.draft, most))
        wanted = take_line(sequence.draft)[sequence.expected :][:most]
        return tuple(Draft(draft.token, i - 1, draft.chance, draft.drafter) for i, draft in enumerate(wanted))

    def cut_at_snapshot(self, sequence: Sequence, count: int) -> int:
        """Cut `count` where a recurrent state is to be kept."""
        if not self.cache.recurrent or sequence.request.pool:
            return count
        return min(count, next_snapshot(sequence, self.cache) - sequence.computed)

    def add(self, sequence: Sequence, count: int) -> None:
        """Put the sequence's next `count` positions into the plan."""
        holding, start, end = sequence.held, sequence.computed, sequence.computed + count
        state_at_start = bool(self.cache.recurrent and holding.tables[self.cache.recurrent[0]])
        self.cache.grow(holding, sequence.certain, end, self.number)
        if (
            state_at_start
            and is_snapshot(sequence, start, self.cache)
            and self.capacity.spares(self.cache.snapshots.state_blocks)
        ):
            self.cache.snapshots.take(holding, start, self.number)
        known = len(sequence.tokens) + sequence.expected
        draft = self._find_drafts(sequence)[: max(0, end - known)]
        output = Output.NONE
        if end >= known:
            output = Output.POOL if sequence.request.pool else Output.SAMPLE
        if not sequence.admitted:
            tokens = tuple(sequence.tokens) if sequence.num_output else sequence.request.tokens
            self._admissions.append(
                Admission(sequence.row, sequence.request, sequence.sibling, tokens, sequence.mu, sequence.adapter)
            )
            sequence.admitted = True
            sequence.chosen = []
        row = Row(
            sequence.row,
            start,
            count,
            output,
            holding.take_changes(),
            tuple(sequence.chosen),
            draft,
            prompt_logprobs=sequence.wants_prompt_logprobs and start < sequence.num_prompt - 1,
        )
        sequence.chosen, sequence.draft = [], []
        expected = 1 + len(draft) if output is Output.SAMPLE and not sequence.beam else 0
        sequence.flights.append(InFlight(count, expected))
        sequence.computed = end
        if count > 1 + len(draft) or start < sequence.num_prompt:
            self.roster.journal.chunk(sequence, start, count, len(self.entries))
            self._num_prompt_rows += 1
            self._num_prompt_tokens += count
        self.entries.append(Entry(sequence, row, sequence.epoch))
        self._shared.append(sequence)

    def _share(self, sequence: Sequence) -> None:
        """Plans run in the order in which they are started, so whole blocks of known tokens are in the tree for the
        next plan, whether or not this one has ended by then. Rows of the same plan never read them: a runner may
        compute its rows in any order. A recurrent state is of use with its snapshot only, which is kept at the end."""
        if not self.cache.recurrent:
            holding = sequence.held
            self.cache.insert(holding, sequence.tokens, min(sequence.certain, len(sequence.tokens)), self.number)
            if sequence.keys:
                self.roster.prefixes.progress(sequence, holding.num_inserted)

    def build(self, saves_now: bool = False) -> Started | None:
        """Finish the plan; None without rows, unless blocks are to be saved now (`saves_now`) or the engine is
        idle."""
        if not self.entries and self.roster.requests and not saves_now:
            return None
        saves = self.cache.saves
        saved = saves.take(self.number, has_rows=bool(self.entries)) if saves is not None else ()
        if not self.entries and not saved:
            return None
        if self.roster.loras.slots:  # rows with the same adapters are multiplied together
            self.entries.sort(key=lambda entry: entry.sequence.adapter)
        copies = self.cache.copies.take()
        plan = Plan(
            self.number,
            tuple(entry.row for entry in self.entries),
            tuple(self._admissions),
            tuple(Move(copy.source, copy.target) for copy in copies),
            self.min_chance,
            self.ahead,
            self.draft_price,
            self.cache.loads.take(self.number),
            saved,
        )
        for sequence in self._shared:
            self._share(sequence)
        self.number += 1
        self.stats.num_steps += 1
        self.stats.max_batch_size = max(self.stats.max_batch_size, len(plan.rows))
        self.stats.num_computed_tokens += plan.num_tokens
        copied = [copy.holding for copy in copies]
        return Started(plan, self.entries, copied, self._num_prompt_rows, self._num_prompt_tokens)
