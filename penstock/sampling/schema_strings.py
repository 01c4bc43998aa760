"""Expressions as llguidance reads them: which it can, and which two match no text in common."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from penstock.sampling.grammar import reason

MAX_KEPT = 2048
MAX_KEPT_CHARS = 2048  # of one


def _refusal(schema: str) -> str:
    return _kept(schema) if len(schema) <= MAX_KEPT_CHARS else _asked(schema)


def _asked(schema: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema, None, {"whitespace_flexible": False}))


_kept = lru_cache(MAX_KEPT)(_asked)


def refusal(schema: dict[str, Any]) -> str | None:
    """Why llguidance does not compile a small schema; None where it does, or where nothing can match it."""
    said = _refusal(json.dumps(schema))
    return reason(said) if said and "nsatisfiable" not in said else None


def is_empty(schema: dict[str, Any]) -> bool:
    """Nothing matches a small schema."""
    return "nsatisfiable" in _refusal(json.dumps(schema))


def are_apart(one: str, two: str) -> bool:
    if one == two:
        return False
    return not _refusal(json.dumps({"type": "object", "patternProperties": {one: True, two: True}}))
