"""Account for results: accept tokens, correct `computed`, insert or evict blocks, end answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.cache.holding import Holding
from penstock.cache.kv import KVCache
from penstock.cache.radix import Place
from penstock.engine.draft_tree import follow
from penstock.engine.messages import HANDED_OVER
from penstock.engine.plan import Output, Plan, Result, Row, RowResult
from penstock.engine.scheduling.beam import BeamGroup
from penstock.engine.scheduling.fast_path import DecodeFastPath
from penstock.engine.scheduling.roster import Roster
from penstock.engine.sequence import Sequence
from penstock.types import Delta, DraftCount, TokenLogprobs

FAILED_STEP = "a step with it, or with what it shares, failed"
LOST_BLOCK = "a block of a prefix was lost from the store"
NUM_PLACES = 8  # of a line that accepted tokens are counted by


@dataclass(slots=True)
class Stats:
    num_requests: int = 0
    num_refused: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    max_batch_size: int = 0  # most sequences in one step
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens not computed thanks to the prefix cache
    num_restored_tokens: int = 0  # of them, those that came from the store
    num_lost_restores: int = 0  # plans that were given up as a block was not in the store
    num_drafts: int = 0  # rows that verified draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: list[int] = field(default_factory=lambda: [0] * NUM_PLACES)  # by place in the line
    drafters: dict[str, list[int]] = field(default_factory=dict)  # name → tokens verified, and accepted
    num_preemptions: int = 0
    num_forks: int = 0  # sequences that began with another's blocks
    step_s: float = 0.0  # in steps, from the queue to the text
    forward_s: float = 0.0  # of that, in forward passes
    sampling_s: float = 0.0  # of that, choosing tokens from their logits


@dataclass(slots=True)
class Entry:
    """One row of a started plan, and its sequence's epoch then: another one now means it ended or was preempted."""

    sequence: Sequence
    row: Row
    epoch: int


@dataclass(slots=True)
class Started:
    """A started plan."""

    plan: Plan
    entries: list[Entry]
    copied: list[Holding]  # holdings that rely on the plan's moves
    num_prompt_rows: int = 0  # of several prompt tokens; the other rows decode
    num_prompt_tokens: int = 0
    was_alone: bool = True  # no other plan was under way when it was made


class Accounts:
    def __init__(self, cache: KVCache, roster: Roster, stats: Stats, fast_path: DecodeFastPath) -> None:
        self.cache = cache
        self.roster = roster
        self.stats = stats
        self._fast_path = fast_path

    def settle(self, started: Started, result: Result) -> list[Delta]:
        self.cache.pool.end(started.plan.number)
        self.stats.forward_s += result.forward_s
        self.stats.sampling_s += result.sampling_s
        if result.lost:
            self.stats.num_lost_restores += 1
            for entry in started.entries:
                if not entry.sequence.num_output:
                    entry.sequence.num_cached = 0  # what it finds the next time was not told of at first
            return self._undo(started, LOST_BLOCK)
        if result.error is not None:
            return self._fail(started, result.error)
        deltas: list[Delta] = []
        num_accepted, accept = 0, self._fast_path.accept
        for entry, outcome in zip(started.entries, result.rows, strict=True):
            sequence = entry.sequence
            if sequence.epoch != entry.epoch:
                if not isinstance(outcome, int) and outcome.error is not None:
                    self._evict(self.cache.uncomputed.find())  # which part was its own is no longer known
                continue
            token = outcome if isinstance(outcome, int) else outcome.only_token
            if token is not None and accept(sequence, token):
                num_accepted += 1
                deltas.append(
                    Delta(
                        sequence.request.id,
                        sequence.sibling,
                        (token,),
                        () if isinstance(outcome, int) else outcome.logprobs,
                        num_cached_tokens=sequence.num_cached or 0,
                    )
                )
            else:
                whole = RowResult((outcome,)) if isinstance(outcome, int) else outcome
                deltas.extend(self._account(entry, whole, started.plan.number))
        self.cache.uncomputed.end(started.plan.number)
        self.stats.num_output_tokens += num_accepted
        return deltas

    def _account(self, entry: Entry, outcome: RowResult, plan: int) -> list[Delta]:
        sequence, row = entry.sequence, entry.row
        flight = sequence.flights.pop(0)
        sequence.held.steady_until = 0
        if outcome.error is not None:
            uncomputed = self.cache.uncomputed.find(sequence.held)
            deltas = self.end_with_error(sequence, outcome.error, outcome.unfit)
            self._evict(uncomputed)
            return deltas
        sequence.computed -= max(0, flight.expected - len(outcome.tokens))
        self._take_prompt_logprobs(sequence, row, outcome)
        taken, finish_reason, stop_reason = self._accept(sequence, outcome.tokens, outcome.complete)
        drafts = self._count_drafts(row, taken) if row.draft else ()
        sequence.mu = outcome.mu if outcome.mu is not None else sequence.mu
        sequence.draft = list(outcome.draft) if outcome.draft else []
        self._insert(sequence, plan)
        if sequence.settled >= sequence.suspect:
            sequence.suspect = 0
        if sequence.beam:
            sequence.candidates = outcome.candidates
            return self._advance(sequence.beam) if sequence.beam.ready else []
        if row.output is Output.NONE:
            return []
        if row.output is Output.POOL:
            finish_reason = "stop"
        elif sequence.request.hand_over and finish_reason is None:
            finish_reason = HANDED_OVER
            if self.cache.saves is not None:
                self.cache.saves.hasten(sequence.held.node)
        self.stats.num_output_tokens += len(taken)
        whole = (
            outcome.complete
            and finish_reason == "stop"
            and len(taken) == len(outcome.tokens)
            and taken[-1] not in sequence.request.stop_token_ids
        )
        delta = Delta(
            sequence.request.id,
            sequence.sibling,
            taken,
            outcome.logprobs[: len(taken)],
            self._first_prompt_logprobs(sequence, len(taken)),
            outcome.embedding,
            finish_reason,
            stop_reason,
            sequence.num_cached or 0,
            complete=whole,
            forced_closing=outcome.forced,
            mu=outcome.mu,
            drafts=drafts,
        )
        if finish_reason:
            self.roster.finish(sequence)
        return [delta]

    def _count_drafts(self, row: Row, taken: tuple[int, ...]) -> tuple[DraftCount, ...]:
        """Count the row's draft tokens, and those that the answer took; returns them by drafter."""
        accepted, names = follow(row.draft, taken), [draft.drafter for draft in row.draft]
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += len(names)
        self.stats.num_accepted_tokens += len(accepted)
        for place in range(min(len(accepted), NUM_PLACES)):
            self.stats.num_accepted_at[place] += 1
        right = [names[i] for i in accepted]
        found = tuple(DraftCount(name, names.count(name), right.count(name)) for name in dict.fromkeys(names))
        for one in found:
            if one.drafter not in self.stats.drafters:  # another thread may be reading it
                self.stats.drafters = {**self.stats.drafters, one.drafter: [0, 0]}
            totals = self.stats.drafters[one.drafter]
            totals[0] += one.num_verified
            totals[1] += one.num_accepted
        return found

    def _accept(
        self, sequence: Sequence, tokens: tuple[int, ...], complete: bool
    ) -> tuple[tuple[int, ...], str | None, int | None]:
        """Append tokens up to the first that ends the answer; returns those taken and why it ended."""
        request = sequence.request
        for i, token in enumerate(tokens):
            sequence.tokens.append(token)
            if token in request.stop_token_ids and sequence.num_output > request.sampling.min_tokens:
                named = request.sampling.ignore_eos or token not in request.eos_token_ids
                return tokens[: i + 1], "stop", token if named else None
            if complete and i + 1 == len(tokens):
                return tokens, "stop", None
            if len(sequence.tokens) >= sequence.limit:
                return tokens[: i + 1], "length", None
        return tokens, None, None

    def _take_prompt_logprobs(self, sequence: Sequence, row: Row, outcome: RowResult) -> None:
        known = len(sequence.prompt_logprobs) - row.start
        if outcome.prompt_logprobs and known >= 0:
            sequence.prompt_logprobs.extend(outcome.prompt_logprobs[known:])

    def _first_prompt_logprobs(self, sequence: Sequence, taken: int) -> tuple[TokenLogprobs | None, ...] | None:
        """All prompt log probabilities, with the first tokens of the answer."""
        wanted = sequence.request.sampling.prompt_logprobs is not None and sequence.sibling == 0
        return (None, *sequence.prompt_logprobs) if wanted and sequence.num_output == taken else None

    def _insert(self, sequence: Sequence, plan: int) -> None:
        """Insert the blocks and snapshots that are certain now into the tree."""
        holding = sequence.held
        self.cache.snapshots.keep(holding, plan)
        self.cache.insert(holding, sequence.tokens, min(sequence.settled, len(sequence.tokens)))
        if sequence.keys and (not self.cache.recurrent or sequence.settled >= sequence.num_prompt):
            self.roster.prefixes.progress(sequence, holding.num_inserted)

    def end_with_error(self, sequence: Sequence, error: str, unfit: bool = False) -> list[Delta]:
        """End a sequence; a beam's failure ends its whole request."""
        self.stats.num_failed += 1
        request = sequence.request
        for other in list(self.roster.requests[request.id]) if sequence.beam else [sequence]:
            if not other.done:
                self.roster.finish(other)
        sibling = 0 if sequence.beam else sequence.sibling
        return [Delta(request.id, sibling, finish_reason="error", error=error, unfit=unfit)]

    def _fail(self, started: Started, error: str) -> list[Delta]:
        """Account for a failed step: a sequence alone in it ends, others run alone for a while, to find the cause."""
        self.stats.num_failed_steps += 1
        for entry in started.entries:
            sequence = entry.sequence
            if not sequence.done:  # one that was admitted anew since then may fail again, with none to blame
                end = min(entry.row.start + entry.row.count, len(sequence.tokens))
                sequence.suspect = max(sequence.suspect, end)
        alone = started.entries[0] if len(started.entries) == 1 else None
        if alone is None or alone.sequence.epoch != alone.epoch:
            return self._undo(started, FAILED_STEP)
        uncomputed = self.cache.uncomputed.find()
        deltas = self.end_with_error(alone.sequence, error)
        self._undo(started, FAILED_STEP, uncomputed)
        return deltas

    def _undo(self, started: Started, why: str, uncomputed: list[Place] | None = None) -> list[Delta]:
        """Take back a plan that computed nothing: its sequences begin anew, and what it put into the tree leaves it."""
        uncomputed = self.cache.uncomputed.find() if uncomputed is None else uncomputed
        self.cache.uncomputed.end(started.plan.number)
        rowed = {entry.sequence for entry in started.entries}
        for sequence in [s for s in self.roster.running if s in rowed or s.holding in started.copied]:
            self.roster.preempt(sequence, why)
        self._evict(uncomputed, why)
        return []

    def _evict(self, uncomputed: list[Place], why: str = FAILED_STEP) -> None:
        """Evict blocks that a failed plan never filled; preempt the sequences that share them."""
        blocks = {block for node, g in uncomputed for block in node.slots[g] or ()}
        for sequence in [s for s in self.roster.running if s.held.has_any(blocks)]:
            self.roster.preempt(sequence, why)
        self.cache.tree.drop(uncomputed)

    def _advance(self, group: BeamGroup) -> list[Delta]:
        """Advance a group whose beams all have candidates: continue the best, fork where one parent has several."""
        request, cached = group.live[0].request, group.live[0].num_cached or 0
        continued, live = {}, []
        for choice in group.advance():
            if choice.parent in continued:
                live.append(self._branch(choice.parent, choice.token, choice.score))
            else:
                continued[choice.parent] = choice
                live.append(choice.parent)
        for parent, choice in continued.items():
            parent.tokens.append(choice.token)
            parent.chosen.append(choice.token)
            parent.score, parent.candidates = choice.score, ()
        for beam in group.live:
            if beam not in continued:
                self.roster.finish(beam)
        group.live = live
        if live:
            return []
        best = group.best()
        self.stats.num_output_tokens += sum(len(hypothesis.tokens) for hypothesis in best)
        return [
            Delta(
                request.id,
                i,
                h.tokens,
                finish_reason=h.finish_reason,
                num_cached_tokens=cached,
                cumulative_logprob=h.score,
            )
            for i, h in reversed(list(enumerate(best)))  # the request ends with its first sibling's delta
        ]

    def _branch(self, parent: Sequence, token: int, score: float) -> Sequence:
        """Make a new beam of the parent's tokens, its state if there is a row for it, and one more token."""
        sibling = self.roster.requests[parent.request.id][-1].sibling + 1
        child = Sequence(
            parent.request,
            parent.number,
            sibling,
            [*parent.tokens, token],
            beam=parent.beam,
            score=score,
            num_cached=parent.num_cached,
        )
        holding = None
        if parent.holding is not None and self.roster.rows:
            holding = self.cache.fork(parent.holding, parent.computed, at_end=True)
            self.stats.num_forks += holding is not None
        self.roster.branch(parent, child, holding)
        return child
