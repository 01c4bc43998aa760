"""A row's parameters for the rarer samplers, as the numbers that a device reads."""

from __future__ import annotations

from penstock.ops import extras as columns
from penstock.ops.extras import OFF
from penstock.sampling.dry import most_repeated
from penstock.sampling.mirostat import MAX_MU
from penstock.types import MAX_LOOKBACK, SamplingParams

STRONGEST = 1e38  # that float32 holds


def extra_numbers(sampling: SamplingParams, mu: float | None, window: int, num_prompt: int) -> list[float]:
    """The columns of `ops.extras`. `window`: tokens that penalties look back on; 0: all."""
    numbers = list(OFF)

    def enter(column: int, value: float) -> None:
        numbers[column] = float(value)

    if sampling.has_dry:
        last_n = sampling.dry_penalty_last_n
        enter(columns.DRY_MULTIPLIER, sampling.dry_multiplier)
        enter(columns.DRY_BASE, sampling.dry_base)
        enter(columns.DRY_ALLOWED, sampling.dry_allowed_length)
        enter(columns.DRY_LAST_N, MAX_LOOKBACK if last_n < 0 else min(last_n, MAX_LOOKBACK))
        enter(columns.DRY_MOST, most_repeated(float(sampling.dry_base), sampling.dry_allowed_length))
    if mu is not None:
        enter(columns.MIROSTAT, sampling.mirostat)
        enter(columns.MIROSTAT_TAU, sampling.mirostat_tau)
        enter(columns.MIROSTAT_ETA, sampling.mirostat_eta)
        enter(columns.MU, min(max(mu, -MAX_MU), MAX_MU))
    elif not sampling.greedy:
        if sampling.has_xtc:
            enter(columns.XTC_PROBABILITY, sampling.xtc_probability)
            enter(columns.XTC_THRESHOLD, sampling.xtc_threshold)
        enter(columns.N_SIGMA, min(max(sampling.top_n_sigma, 0.0), STRONGEST))
        enter(columns.DYNATEMP_RANGE, sampling.dynatemp_range)
        enter(columns.DYNATEMP_EXPONENT, sampling.dynatemp_exponent)
    enter(columns.WINDOW, window)
    enter(columns.NUM_PROMPT, num_prompt)
    return numbers
