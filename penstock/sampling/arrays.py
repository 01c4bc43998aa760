"""Rows of numbers, and what is said of a row that leaves no choice. Free of torch: grammars are tried without it."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


class UnusableLogits(ArithmeticError):
    """No token can be chosen from this row; the message says why."""


class NothingAllowed(UnusableLogits):
    """The request's own constraints leave no token."""
