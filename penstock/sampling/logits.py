"""The logits array and its errors. No torch: grammars compile without it."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


class UnusableLogits(ArithmeticError):
    """No token can be sampled from this row; the message says why."""


class NothingAllowed(UnusableLogits):
    """The request's own constraints leave no token."""
