"""Costs of steps from noisy, shifting and absurd measurements."""

from __future__ import annotations

import random

import pytest

from penstock.engine.scheduling.step_fit import MIN_SAMPLES, StepFit, solve


def taught(num_steps: int = 200, seed: int = 1, noise: float = 0.0, outliers: float = 0.0) -> StepFit:
    """A fit to 4 + 3·x + 20·y, in which some steps take fifty times as long."""
    rng, fit = random.Random(seed), StepFit(2)
    for _ in range(num_steps):
        x, y = rng.random(), 0.2 + rng.random()
        seconds = (4 + 3 * x + 20 * y) * (1 + noise * (rng.random() - 0.5))
        fit.note((x, y), seconds * (50 if rng.random() < outliers else 1))
    return fit


def test_finds_a_line() -> None:
    assert taught().coefficients == pytest.approx([4, 3, 20], abs=0.1)
    assert taught().estimate(1.0, 1.0) == pytest.approx(27, abs=0.05)


def test_noise_and_compilations_are_survived() -> None:
    """Breaks when one step that compiled a kernel is believed."""
    fit = taught(noise=0.2, outliers=0.03)
    assert fit.estimate(0.5, 0.7) == pytest.approx(19.5, rel=0.12)
    assert fit.coefficients[2] == pytest.approx(20, rel=0.25)


def test_a_first_step_that_compiles_is_survived() -> None:
    fit = StepFit(2)
    fit.note((0.0, 1.0), 2000.0)
    for y in (1.0, 0.5, 1.0, 2.0, 0.7, 1.0, 0.3, 1.5, 1.0, 0.6):
        fit.note((0.1, y), 4 + 20 * y)
    assert fit.estimate(0.1, 1.0) == pytest.approx(24, rel=0.15)


def test_not_ready_before_it_has_samples() -> None:
    fit = StepFit(1)
    for number in range(MIN_SAMPLES):
        assert not fit.is_ready
        fit.note((float(number),), 1.0)
    assert fit.is_ready and fit.estimate(100.0) == pytest.approx(1.0, abs=0.01)


def test_a_slower_machine_is_noticed() -> None:
    fit = taught()
    rng = random.Random(3)
    for _ in range(300):
        y = 0.2 + rng.random()
        fit.note((0.5, y), 3 * (5.5 + 20 * y))
    assert fit.estimate(0.5, 1.0) == pytest.approx(76.5, rel=0.02)


def test_equal_steps_leave_the_slope_as_it_was() -> None:
    """Breaks when steps of one size make the fit forget what a token costs."""
    fit = taught()
    for _ in range(2000):
        fit.note((0.5, 0.7), 19.5)
    assert fit.coefficients[2] == pytest.approx(20, rel=0.2)
    assert fit.estimate(0.5, 1.0) == pytest.approx(25.5, rel=0.05)


def test_elimination() -> None:
    assert solve([[4.0, 1.0], [1.0, 3.0]], [1.0, 2.0]) == pytest.approx([1 / 11, 7 / 11])
