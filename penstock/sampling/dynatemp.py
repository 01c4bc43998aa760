"""Dynamic temperature: the surer the model, the lower. As in llama.cpp it comes after the filters."""

from __future__ import annotations

import numpy as np

from penstock.sampling.arrays import Array
from penstock.types import SamplingParams


def dynamic_temperature(weights: Array, sampling: SamplingParams) -> float:
    """From `temperature - dynatemp_range` where one token is certain to `temperature + dynatemp_range` where all that
    are left are equally likely; the exponent bends what lies between."""
    lowest = max(0.0, sampling.temperature - sampling.dynatemp_range)
    highest = sampling.temperature + sampling.dynatemp_range
    probabilities = weights[weights > 0].astype(np.float64)
    if len(probabilities) < 2:
        return sampling.temperature
    probabilities /= probabilities.sum()
    entropy = -float((probabilities * np.log(probabilities)).sum()) / float(np.log(len(probabilities)))
    return float(lowest + (highest - lowest) * min(max(entropy, 0.0), 1.0) ** sampling.dynatemp_exponent)
