"""Beam search against a search by the book, and its bookkeeping."""

from __future__ import annotations

import random

import pytest

from penstock.cache.group import Group
from penstock.engine.scheduling.beam import BeamGroup
from penstock.engine.sequence import Sequence
from penstock.types import BeamSearchParams, Request
from tests.engine.stage import FULL, STATE, Stage, window


def beam(width: int, max_tokens: int = 6, **options: float) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [(FULL,), (STATE,), (FULL, window(5)), (FULL, window(5), STATE)])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("overlap", [0, 2])
def test_beams_equal_a_search_by_the_book(groups: tuple[Group, ...], width: int, overlap: int) -> None:
    """The ledger compares every beam: tokens, order, score and end."""
    stage = Stage(*groups, num_blocks=128, overlap=overlap)
    for penalty in (0.0, 1.0, 2.0):
        stage.add(7, max_tokens=6, beam=beam(width, length_penalty=penalty), eos_token_ids=(3, 14, 15))
    stage.add(9, max_tokens=10)
    stage.run()
    assert len([delta for delta in stage.deltas if delta.cumulative_logprob is not None]) == 3 * width


@pytest.mark.parametrize("seqs", [1, 2, 3])
@pytest.mark.parametrize("blocks", [4, 6, 12])
def test_beams_take_turns_where_rows_or_blocks_are_few(seqs: int, blocks: int) -> None:
    stage = Stage(FULL, num_blocks=blocks, max_num_seqs=seqs)
    stage.add(9, max_tokens=6, beam=beam(4))
    stage.add(5, max_tokens=6)
    stage.run()


def test_beams_share_what_they_have_in_common() -> None:
    stage = Stage(FULL)
    stage.add(32, max_tokens=6, beam=beam(4))
    stage.run()
    assert stage.stats.num_forks > 0
    assert stage.stats.num_computed_tokens <= 32 + 5 * 4
    assert max(plan.num_tokens for plan in stage.plans[1:]) == 4


def test_the_device_is_told_of_every_chosen_token() -> None:
    stage = Stage(FULL)
    stage.add(6, max_tokens=6, beam=beam(3))
    stage.run()
    told = sum(len(row.tokens) for plan in stage.plans for row in plan.rows)
    admitted = sum(len(admission.tokens) - 6 for plan in stage.plans[1:] for admission in plan.admissions)
    assert told > 0 and admitted > 0


def test_moves_are_made_in_the_order_they_were_asked_for() -> None:
    """A block may be the source of one and, given up meanwhile, the target of the next."""
    stage = Stage(FULL, STATE)
    stage.add(6, max_tokens=6, beam=beam(4))
    while not stage.cache.copies.pending:
        stage.step()
    asked = [(copy.source, copy.target) for copy in stage.cache.copies.pending]
    stage.step()
    assert len(asked) > 1
    assert [(move.source, move.target) for move in stage.plans[-1].moves][: len(asked)] == asked
    stage.run()


def test_an_aborted_search_ends_once() -> None:
    stage = Stage(FULL)
    request = stage.add(6, max_tokens=9, beam=beam(3, 9))
    stage.step(4)
    assert len([s for s in stage.sequences(request) if not s.done]) == 3
    deltas = stage.abort(request, 0)
    assert [(delta.sibling, delta.finish_reason) for delta in deltas] == [(0, "abort")]
    assert stage.cache.pool.num_used == 0
    stage.run()


def candidates(rng: random.Random, count: int) -> tuple[tuple[int, float], ...]:
    tokens = rng.sample(range(100), count)
    return tuple((token, -rng.random() * 5) for token in tokens)


def test_choices_are_the_best_continuations() -> None:
    rng = random.Random(1)
    for _ in range(50):
        request = Request(id="r", tokens=(1,), beam=beam(3, 9))
        group = BeamGroup(beam(3, 9), frozenset({5, 6}))
        group.live = [Sequence(request, 1, i, [1], beam=group, score=-rng.random()) for i in range(3)]
        for live in group.live:
            live.candidates = candidates(rng, 6)
        expected = sorted(
            ((live.score + logprob, token) for live in group.live for token, logprob in live.candidates), reverse=True
        )
        choices = group.advance()
        going = [(score, token) for score, token in expected if token not in (5, 6)][:3]
        assert [(choice.score, choice.token) for choice in choices] == going
        ended = [(score, token) for score, token in expected if token in (5, 6) and score > going[-1][0]]
        assert [(h.score, h.tokens[-1], h.finish_reason) for h in group.finished] == [
            (score, token, "stop") for score, token in ended
        ]


def test_the_last_step_ends_every_choice() -> None:
    request = Request(id="r", tokens=(1,), beam=beam(2, 2))
    group = BeamGroup(beam(2, 2), frozenset())
    group.live = [Sequence(request, 1, 0, [1, 7], beam=group, score=-1.0, candidates=((3, -0.5), (4, -0.25)))]
    assert group.ready
    assert group.advance() == []
    assert [(h.tokens, h.score, h.finish_reason) for h in group.best()] == [
        ((7, 4), -1.25, "length"),
        ((7, 3), -1.5, "length"),
    ]


def test_the_length_penalty_ranks_the_finished() -> None:
    from penstock.engine.scheduling.beam import Hypothesis

    short, long = Hypothesis((1,), -1.0, "stop"), Hypothesis((1, 2, 3, 4), -2.0, "length")
    for penalty, best in ((0.0, short), (1.0, long)):
        group = BeamGroup(beam(1, 9, length_penalty=penalty), frozenset(), finished=[long, short])
        assert group.best() == [best]
