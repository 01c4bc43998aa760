"""Durations as Ollama writes them: seconds, or numbers with units, as in 5m or 1h30m."""

from __future__ import annotations

import math
import re

UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{0,9})?)(ns|us|µs|ms|s|m|h)")
_BARE = re.compile(r"\d{1,12}(?:\.\d{0,9})?")


def seconds(given: float | str) -> float:
    """How long; a negative duration is forever."""
    if isinstance(given, str):
        given = _parse(given.strip())
    if math.isnan(given):
        raise ValueError("a duration must be a number")
    return math.inf if given < 0 else float(given)


def _parse(text: str) -> float:
    sign = -1.0 if text.startswith("-") else 1.0
    digits = text.lstrip("+-") if text[:2] not in ("--", "+-", "-+", "++") else ""
    if _BARE.fullmatch(digits):
        return sign * float(digits)
    parts = _PART.findall(digits)
    if not parts or "".join(number + unit for number, unit in parts) != digits:
        raise ValueError(f"{text[:40]!r} is no duration: give seconds, or a text like 5m or 1h30m; -1 is forever")
    return sign * sum(float(number) * UNITS_S[unit] for number, unit in parts)
