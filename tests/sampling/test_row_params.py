"""What a row asks of a device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.ops.sampling.row_params import MAX_BIASED, NEUTRAL, REPETITION, TOP_K
from penstock.sampling import RowState
from penstock.sampling.row import Chooser


def test_every_number_is_one_that_float32_holds(make_row: Callable[..., RowState]) -> None:
    """An infinite penalty would make no number of a logit of 0."""
    row = make_row(temperature=1, top_k=10**400, top_p=1e-60, repetition_penalty=1e300)
    row_params = np.array(row.row_params(), dtype=np.float32)
    assert np.isfinite(row_params).all() and row_params[TOP_K] > 1e7 and row_params[REPETITION] > 1e37


def test_a_row_whose_tokens_the_host_chooses_asks_nothing(make_row: Callable[..., RowState]) -> None:
    """More biases than an entry has room for would be read past its end."""
    biases = {token: 1.0 for token in range(MAX_BIASED + 1)}
    for row in (make_row(logit_bias=biases, presence_penalty=1.0), make_row(temperature=1, typical_p=0.5, top_k=3)):
        assert row.chooser is Chooser.HOST and row.row_params() == list(NEUTRAL)
