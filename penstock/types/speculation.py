"""Speculation as one request asks for it: a part of what the engine drafts, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import InvalidRequest, quote
from penstock.types.values import is_count, require

AUTO = "auto"
PREDICTION = "prediction"  # the drafter of a request's predicted output
METHODS = (AUTO, "ngram", "suffix", "lookahead")
MAX_DRAFT = 32  # tokens


@dataclass(frozen=True)
class SpeculationParams:
    """Limits of one request: drafts of one method alone, of so many tokens at most. None: as the engine is set."""

    method: str | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        is_known = self.method is None or self.method in METHODS
        require(is_known, "speculation.method", self.method, f"one of {', '.join(METHODS)}")
        most = self.num_speculative_tokens
        is_valid = most is None or is_count(most) and 1 <= most <= MAX_DRAFT
        require(
            is_valid, "speculation.num_speculative_tokens", most, f"1 to {MAX_DRAFT}, or speculation False for none"
        )


def read_speculation(value: Any) -> SpeculationParams | bool | None:
    """Read a request's `speculation`: None is the engine's setting, False none, an object limits it."""
    if value is None or value is False or isinstance(value, SpeculationParams):
        return value
    require(isinstance(value, Mapping), "speculation", value, "an object, False for none, or None")
    known = [field.name for field in fields(SpeculationParams)]
    for name in value:
        if name not in known:
            raise InvalidRequest(f"speculation has no {quote(name)}: give {' or '.join(known)}")
    return SpeculationParams(**value)


def count_most(params: SpeculationParams | bool | None) -> int:
    """Return the most draft tokens of a step that a request takes."""
    if params is False:
        return 0
    most = params.num_speculative_tokens if isinstance(params, SpeculationParams) else None
    return MAX_DRAFT if most is None else most
