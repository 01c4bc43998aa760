"""Entries of the ledger: what was done to compute an answer that its request does not say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Applied:
    """One entry. `value` is plain data; without `exact` the same request may give other bits the next time."""

    kind: str
    value: Any
    exact: bool = True


class DraftCount(NamedTuple):
    """Tokens of one drafter: verified, and accepted of those."""

    drafter: str
    num_verified: int
    num_accepted: int
