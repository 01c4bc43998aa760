"""How many prompt tokens a step takes beside decode rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.scheduling.prompt_cap import MIN_CHUNK, MIN_OVERHEAD, PromptCap
from tests.engine.stage import Stage

BASE_S, ROW_S, TOKEN_S = 4e-3, 0.02e-3, 0.025e-3


def cost_s(num_decode: int, num_prompt: int, hidden: int = 100) -> float:
    return BASE_S + ROW_S * num_decode + TOKEN_S * max(0, num_prompt - hidden)


def taught(tpot_s: float | None = None, ttft_s: float | None = None, hidden: int = 100) -> PromptCap:
    cap = PromptCap(tpot_s, ttft_s)
    for number in range(60):
        num_decode = 8 + 7 * number % 120
        cap.note(num_decode, 0, cost_s(num_decode, 0))
        num_prompt = 300 + 211 * number % 1500
        cap.note(num_decode, num_prompt, cost_s(num_decode, num_prompt, hidden))
    return cap


def chosen(cap: PromptCap, num_decode: int, backlog: int) -> int:
    count = cap.choose(num_decode, backlog)
    assert count is not None
    return count


def test_no_cap_where_nobody_decodes_or_nothing_is_known() -> None:
    assert taught().choose(0, 5000) is None and PromptCap(0.01, 1.0).choose(8, 5000) is None


def test_a_step_keeps_the_tpot_aim() -> None:
    for aim_s in (8e-3, 12e-3, 20e-3):
        for num_decode in (1, 64, 128):
            count = chosen(taught(aim_s, ttft_s=10.0), num_decode, 1024)
            assert cost_s(num_decode, count) <= aim_s * 1.02
            assert cost_s(num_decode, count) >= min(aim_s, 11 * cost_s(num_decode, 0) * 0.3) * 0.9


def test_a_long_backlog_widens_the_cap_up_to_nearly_full_pace() -> None:
    cap = taught(tpot_s=8e-3, ttft_s=0.2)
    counts = [chosen(cap, 64, backlog) for backlog in (500, 2000, 3000, 3600, 5000, 50_000)]
    assert counts == sorted(counts) and counts[0] < counts[-1] == counts[-2]
    most = counts[-1]
    fixed_s = cost_s(64, 0) - 100 * TOKEN_S
    assert TOKEN_S * most == pytest.approx(fixed_s / MIN_OVERHEAD, rel=0.05)


def test_a_shorter_ttft_aim_takes_larger_chunks() -> None:
    slow, fast = taught(8e-3, 5.0), taught(8e-3, 0.15)
    assert chosen(slow, 64, 2048) < chosen(fast, 64, 2048)


def test_without_aims_more_rows_get_chunks_that_keep_pace() -> None:
    """The default never holds prompts below three quarters of their full pace."""
    cap = taught()
    for num_decode in (4, 64, 128):
        count = chosen(cap, num_decode, 600)
        assert count * TOKEN_S / cost_s(num_decode, count) >= 0.7


def test_tokens_that_cost_nothing_are_used() -> None:
    count = chosen(taught(hidden=250), 8, 600)
    assert 230 <= count <= 300


def test_a_device_whose_chunks_cost_extra_gets_large_ones() -> None:
    cap = PromptCap()
    for number in range(60):
        num_prompt = 300 + 211 * number % 3000
        cap.note(16, 0, cost_s(16, 0))
        cap.note(16, num_prompt, cost_s(16, num_prompt, 0) + 2e-3)
    assert chosen(cap, 16, 600) >= 1400  # 2 ms are 5 % of 40 ms


sizes = st.integers(0, 300)
seconds = st.floats(allow_nan=True, allow_infinity=True)
aims = st.none() | st.floats(1e-4, 100)


@given(st.lists(st.tuples(sizes, st.integers(0, 9000), seconds), max_size=60), sizes, st.integers(1, 10**6), aims, aims)
def test_whatever_was_measured_a_prompt_advances(
    steps: list[tuple[int, int, float]], num_decode: int, backlog: int, tpot_s: float | None, ttft_s: float | None
) -> None:
    cap = PromptCap(tpot_s, ttft_s)
    for step in steps:
        cap.note(*step)
    count = cap.choose(num_decode, backlog)
    assert count is None or count >= MIN_CHUNK


class Fixed(PromptCap):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def choose(self, num_decode: int, backlog: int) -> int | None:
        return self.count if num_decode else None


def test_every_step_advances_all_decode_rows_and_the_oldest_prompt() -> None:
    stage = Stage(num_blocks=400, prompt_cap=Fixed(3))
    answers = [stage.add(2, max_tokens=60) for _ in range(3)]
    stage.step(2)
    prompts = [stage.add(20, max_tokens=1), stage.add(11, max_tokens=1)]
    begin = len(stage.plans)
    stage.run()
    rows = [stage.plans[0].admissions[number].row for number in range(len(answers))]
    for plan in stage.plans[begin : begin + 11]:  # 31 prompt tokens, 3 at a time
        assert [row.count for row in plan.rows if row.row in rows] == [1, 1, 1]
        assert 1 <= plan.num_tokens - 3 <= 3
    assert stage.finished()[:2] == [prompt.id for prompt in prompts]


def test_prompts_come_whole_where_nobody_decodes() -> None:
    stage = Stage(prompt_cap=Fixed(3))
    stage.add(20)
    stage.add(10)
    stage.step()
    assert stage.counts() == [[20, 10]]
    stage.run()


def test_an_embedding_is_not_held_back() -> None:
    stage = Stage(num_blocks=400, prompt_cap=Fixed(3))
    stage.add(2, max_tokens=100)
    stage.step(2)
    pooled = stage.add(30, pool=True)
    stage.step(3)
    assert pooled.id in stage.finished()
    stage.run()
