"""One kind of step: decode, prefill, chunks, siblings and drafts out of one budget."""

from __future__ import annotations

import pytest

from penstock.cache.group import Group
from penstock.engine.plan import Output
from tests.engine.stage import FULL, STATE, Stage, window
from tests.simulation.forward import Drafting


def test_a_prompt_is_one_step_and_each_token_another() -> None:
    stage = Stage()
    stage.add(10, max_tokens=4)
    stage.run()
    assert stage.counts() == [[10], [1], [1], [1]]
    assert [row.output for plan in stage.plans for row in plan.rows] == [Output.SAMPLE] * 4


def test_a_long_prompt_is_cut_in_chunks() -> None:
    stage = Stage(max_num_batched_tokens=8)
    stage.add(20, max_tokens=2)
    stage.run()
    assert stage.counts() == [[8], [8], [4], [1]]
    assert [row.output for plan in stage.plans for row in plan.rows] == [Output.NONE] * 2 + [Output.SAMPLE] * 2


def test_decoding_rows_come_before_chunks_of_prompts() -> None:
    """An earlier prompt must not stop a later answer: what rows that decode need is kept back for them."""
    stage = Stage(max_num_batched_tokens=8)
    stage.add(4, max_tokens=12)
    stage.step()
    stage.add(30, max_tokens=2)
    stage.run()
    assert stage.counts()[:6] == [[4], [1, 7], [1, 7], [1, 7], [1, 7], [1, 2]]


@pytest.mark.parametrize("num_blocks", [64, 11])
def test_a_decoding_row_is_served_though_a_longer_one_ranks_before_it(num_blocks: int) -> None:
    """Also where blocks are so few, at the end of the prompt, that rank decides about all."""
    stage = Stage(policy="priority", max_num_batched_tokens=8, num_blocks=num_blocks)
    stage.add(4, max_tokens=12, priority=5)
    stage.step()
    stage.add(30, max_tokens=2, priority=0)
    stage.step(4)
    assert [sorted(counts) for counts in stage.counts()[1:5]] == [[1, 7]] * 4


def test_new_requests_join_at_every_step() -> None:
    stage = Stage()
    for _ in range(4):
        stage.add(3, max_tokens=8)
        stage.step()
    assert stage.counts() == [[3], [1, 3], [1, 1, 3], [1, 1, 1, 3]]
    stage.run()


def test_a_budget_of_one_token_makes_more_steps_only() -> None:
    stage = Stage(max_num_batched_tokens=1)
    stage.add(5, max_tokens=3)
    stage.add(4, max_tokens=3)
    stage.run()
    assert all(counts == [1] for counts in stage.counts())


def test_rows_are_never_more_than_max_num_seqs() -> None:
    stage = Stage(max_num_seqs=3)
    for _ in range(7):
        stage.add(3)
    stage.run()
    assert max(map(len, stage.counts())) == 3 == stage.stats.max_batch_size


@pytest.mark.parametrize("overlap", [0, 1, 2, 3])
def test_overlap_starts_so_many_plans_before_it_waits(overlap: int) -> None:
    stage = Stage(overlap=overlap)
    stage.add(6, max_tokens=10)
    stage.step()
    assert len(stage.plans) == overlap + 1
    assert len(stage.device.unfinished) == overlap
    starts = [row.start for plan in stage.plans for row in plan.rows]
    assert starts == [0, 6, 7, 8][: overlap + 1]
    stage.run()
    assert stage.stats.num_steps == 10, "no plan beyond the last token"


def test_drafts_save_steps_and_change_no_token() -> None:
    plain, drafted = Stage(), Stage(drafting=Drafting(rate=1.0, longest=4, accuracy=1.0))
    for stage in (plain, drafted):
        stage.add(6, max_tokens=24)
        stage.run()
    assert drafted.stats.num_steps < plain.stats.num_steps / 2
    assert drafted.stats.num_accepted_tokens > 10
    assert drafted.stats.num_output_tokens == plain.stats.num_output_tokens == 24


def test_rejected_drafts_are_computed_again() -> None:
    stage = Stage(drafting=Drafting(rate=1.0, longest=4, accuracy=0.0))
    request = stage.add(6, max_tokens=12)
    stage.step(2)
    sequence = stage.sequences(request)[0]
    assert len(stage.plans[1].rows[0].draft) >= 1
    assert sequence.computed == sequence.settled == len(sequence.tokens) - 1
    stage.run()
    assert stage.device.tally.num_rejected > 0


def test_a_draft_never_passes_the_limit() -> None:
    stage = Stage(drafting=Drafting(rate=1.0, longest=8, accuracy=1.0))
    stage.add(3, max_tokens=3)
    stage.run()
    assert max(row.start + row.count for plan in stage.plans for row in plan.rows) <= 3 + 3 - 1


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_a_start_is_an_upper_bound_while_drafts_are_verified(overlap: int) -> None:
    stage = Stage(overlap=overlap, drafting=Drafting(rate=1.0, longest=8, accuracy=0.6))
    stage.add(4, max_tokens=60)
    stage.run()
    assert any(len(row.draft) for plan in stage.plans for row in plan.rows)


def test_a_recurrent_state_takes_no_drafts() -> None:
    stage = Stage(FULL, STATE, drafting=Drafting(rate=1.0, longest=4, accuracy=1.0))
    stage.add(6, max_tokens=12)
    stage.run()
    assert stage.stats.num_draft_tokens == 0


def test_pooling_takes_the_whole_prompt_in_one_step() -> None:
    stage = Stage(FULL, STATE, max_num_batched_tokens=32)
    stage.add(5, max_tokens=8)
    stage.step()
    stage.add(32, pool=True)
    stage.run()
    pooled = [row for plan in stage.plans for row in plan.rows if row.output is Output.POOL]
    assert [(row.start, row.count) for row in pooled] == [(0, 32)]
    assert stage.deltas[-1].embedding is not None


@pytest.mark.parametrize("groups", [(FULL,), (window(5),), (FULL, window(5), STATE)])
def test_any_groups_give_the_same_kind_of_step(groups: tuple[Group, ...]) -> None:
    stage = Stage(*groups, max_num_batched_tokens=16)
    for length in (1, 3, 17, 40):
        stage.add(length, max_tokens=6)
    stage.run()


def test_a_model_without_state_pools_many_prompts() -> None:
    stage = Stage(stateless=True, num_blocks=1, max_num_batched_tokens=16)
    for length in (3, 16, 5, 9):
        stage.add(length, pool=True)
    stage.run()
    assert stage.counts() == [[3], [16], [5, 9]]
