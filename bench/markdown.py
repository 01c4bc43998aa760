"""Pieces of the reports that all benchmarks write."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from bench.quiet import BUSY


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def busy_notes(shares: Iterable[float | None], resting: str) -> list[str]:
    """A warning where others used the machine while what is measured rested."""
    known = [share for share in shares if share is not None]
    if not known or statistics.median(known) <= BUSY:
        return []
    return [
        f"**The machine was busy while all {resting} rested ({100 * statistics.median(known):.0f} % of its cores): "
        "these figures are not to be trusted.**"
    ]
