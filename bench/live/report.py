"""Lines of JSON as a table for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
BUSY_CLIENT = 0.7  # of a core; above it the client may be what is measured
COLUMNS = (  # head, field, how it is written
    ("out tok/s", "out_tok_s", ",.0f"),
    ("again", "again_out_tok_s", ",.0f"),
    ("first/again", "first_share", ".2f"),
    ("TTFT p50", "ttft_p50_ms", ",.1f"),
    ("p99", "ttft_p99_ms", ",.1f"),
    ("TPOT p50", "tpot_p50_ms", ".2f"),
    ("p99", "tpot_p99_ms", ".2f"),
    ("goodput", "goodput", ".1%"),
)


def table(rows: Sequence[Row]) -> str:
    """One line per case, and one per size of `first-sizes`; latencies are in ms."""
    lines = [_line("case", [head for head, _, _ in COLUMNS])]
    notes = []
    for row in rows:
        if "ready_s" in row and row["case"] == "ready":
            lines.append(f"{row['case']:<20}{row['ready_s']:.1f} s")
            continue
        lines.append(_line(row["case"], [_format(row.get(field), form) for _, field, form in COLUMNS]))
        for size, figures in row.get("sizes", {}).items():
            lines.append(_line(f"  {size}", [_format(figures.get(field), form) for _, field, form in COLUMNS]))
        notes += _notes(row)
    return "\n".join([*(line.rstrip() for line in lines), *notes])


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<20}" + "".join(f"{cell:>12}" for cell in cells)


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _notes(row: Row) -> list[str]:
    found = []
    if (missing := row["num_requests"] - row["num_ok"]) > 0:
        counted = ", ".join(f"{name}: {number}" for name, number in row["errors"].items())
        found.append(
            f"{row['case']}: {missing} of {row['num_requests']} requests are not in the speeds and latencies "
            f"({counted}); the first: {row['first_error']}"
        )
    if row["client_busy"] > BUSY_CLIENT:
        found.append(f"{row['case']}: a client took {row['client_busy']:.0%} of a core: raise --clients")
    if row["cached_tokens"]:
        found.append(f"{row['case']}: the server had {row['cached_tokens']} prompt tokens in its prefix cache")
    return found
