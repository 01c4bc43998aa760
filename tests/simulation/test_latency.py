"""TTFT and TPOT of 1,024 tokens in and 256 out at three rates, in simulated time, with the cap and without."""

from __future__ import annotations

from functools import lru_cache

import pytest

from penstock.engine.scheduling.prompt_cap import PromptCap
from tests.simulation.latency import Device, Latency, Load, LoadRun, run_loads

NUM_REQUESTS = 400  # of each of two loads


@lru_cache
def run_capped() -> Latency:
    return run_loads(20, Device(), PromptCap, NUM_REQUESTS)


@pytest.mark.parametrize(
    ("per_s", "num_requests"),
    [pytest.param(10, 700, marks=pytest.mark.slow), (20, 700), pytest.param(28, 1000, marks=pytest.mark.slow)],
)
def test_the_cap_shortens_the_tails(per_s: float, num_requests: int) -> None:
    """On a device fitted to what was measured on an H200: each p99 falls, TPOT throughout."""
    before = run_loads(per_s, Device(), lambda: None, num_requests)
    after = run_loads(per_s, Device(), PromptCap, num_requests)
    ttft, ttft_99, tpot, tpot_99 = before.percentiles()
    new_ttft, new_ttft_99, new_tpot, new_tpot_99 = after.percentiles()
    assert new_ttft_99 < ttft_99 and new_tpot_99 < tpot_99 and new_tpot < tpot
    assert new_ttft < 1.15 * ttft
    longest = max(seconds for rows, _, seconds in before.steps if rows)
    assert max(seconds for rows, _, seconds in after.steps if rows) < 0.5 * longest


@pytest.mark.parametrize(
    ("per_s", "aims"),
    [
        (10, (30, 80, 5.8, 7.5)),
        pytest.param(20, (50, 130, 10, 14), marks=pytest.mark.slow),
        pytest.param(28, (110, 350, 22, 32), marks=pytest.mark.slow),
    ],
)
def test_the_aims_where_weights_hide_200_tokens(per_s: float, aims: tuple[float, ...]) -> None:
    latency = run_loads(per_s, Device(27.5e-6, 200), PromptCap, 700)
    assert all(value < 1.1 * aim for value, aim in zip(latency.percentiles(), aims))


@pytest.mark.parametrize("device", [pytest.param(Device(25.5e-6, 0), marks=pytest.mark.slow), Device(24e-6, 0, 2e-3)])
def test_little_is_lost_where_chunks_save_nothing(device: Device) -> None:
    before = run_loads(20, device, lambda: None, NUM_REQUESTS).percentiles()
    after = run_loads(20, device, PromptCap, NUM_REQUESTS).percentiles()
    assert all(new < 1.15 * old for new, old in zip(after, before))


def test_noise_changes_little() -> None:
    calm = run_capped().percentiles()
    noisy = run_loads(20, Device(token_s=24e-6, noise=0.15), PromptCap, NUM_REQUESTS).percentiles()
    assert all(new < 1.25 * old for new, old in zip(noisy, calm))


def test_a_tpot_aim_is_kept_while_first_tokens_may_wait() -> None:
    """At 20 requests a second answers of 7 ms a token leave prompts enough time."""
    strict = run_loads(20, Device(), lambda: PromptCap(tpot_s=7e-3, ttft_s=2.0), NUM_REQUESTS).percentiles()
    free = run_capped().percentiles()
    assert strict[3] < 1.1 * 7 < free[3] and strict[0] > free[0]


def test_a_ttft_aim_takes_time_from_answers() -> None:
    patient = run_loads(20, Device(), lambda: PromptCap(tpot_s=8e-3, ttft_s=5.0), NUM_REQUESTS).percentiles()
    urgent = run_loads(20, Device(), lambda: PromptCap(tpot_s=8e-3, ttft_s=0.1), NUM_REQUESTS).percentiles()
    assert urgent[1] < patient[1] and urgent[2] > patient[2]


def test_it_is_deterministic() -> None:
    first, second = (LoadRun(Load(20, 200), Device(noise=0.1), PromptCap()).run() for _ in range(2))
    assert first == second
