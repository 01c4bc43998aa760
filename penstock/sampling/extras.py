"""A row's parameters for the rarer samplers, as the numbers that a device reads."""

from __future__ import annotations

from penstock.ops.extras import OFF
from penstock.sampling.dry import most_repeated
from penstock.sampling.mirostat import MAX_MU
from penstock.types import MAX_LOOKBACK, SamplingParams

STRONGEST = 1e38             # that float32 holds


def extra_numbers(sampling: SamplingParams, mu: float | None, window: int, num_prompt: int) -> list[float]:
    """The columns of `ops.extras`. `window`: tokens that penalties look back on; 0: all."""
    numbers = list(OFF)
    if sampling.has_dry:
        base, allowed = float(sampling.dry_base), sampling.dry_allowed_length
        last_n = sampling.dry_penalty_last_n
        numbers[:5] = [float(sampling.dry_multiplier), base, float(allowed),
                       float(MAX_LOOKBACK if last_n < 0 else min(last_n, MAX_LOOKBACK)),
                       float(most_repeated(base, allowed))]
    if mu is not None:
        numbers[10:14] = [float(sampling.mirostat), float(sampling.mirostat_tau), float(sampling.mirostat_eta),
                          min(max(mu, -MAX_MU), MAX_MU)]
    elif not sampling.greedy:
        if sampling.has_xtc:
            numbers[5:7] = [float(sampling.xtc_probability), float(sampling.xtc_threshold)]
        numbers[7] = min(max(float(sampling.top_n_sigma), 0.0), STRONGEST)
        numbers[8:10] = [float(sampling.dynatemp_range), float(sampling.dynatemp_exponent)]
    numbers[14:16] = [float(window), float(num_prompt)]
    return numbers
