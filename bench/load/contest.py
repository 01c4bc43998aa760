"""Medians over rounds, and how the first server stands beside the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.markdown import busy_notes, table

Row = dict[str, Any]
# what it is called, where it stands in a phase's figures, whether more is better, how it is written
FIGURES = (
    ("tokens/s", ("output_tokens_per_s",), True, "{:.1f}"),
    ("requests/s", ("requests_per_s",), True, "{:.2f}"),
    ("goodput/s", ("goodput", "requests_per_s"), True, "{:.2f}"),
    ("TTFT mean, s", ("ttft_s", "mean"), False, "{:.3f}"),
    ("TTFT p99, s", ("ttft_s", "p99"), False, "{:.3f}"),
    ("TPOT p50, s", ("tpot_s", "p50"), False, "{:.4f}"),
    ("ITL p99, s", ("itl_s", "p99"), False, "{:.4f}"),
    ("E2E p50, s", ("e2e_s", "p50"), False, "{:.3f}"),
)


def summarize(turns: Sequence[Row], first: str) -> list[Row]:
    """One row per workload and server. A turn's figures are its last phase's."""
    rows = []
    for workload, server in dict.fromkeys((turn["workload"], turn["server"]) for turn in turns):
        own = [turn for turn in turns if (turn["workload"], turn["server"]) == (workload, server)]
        figures = [turn["phases"][-1]["figures"] for turn in own]
        rows.append(
            {
                "workload": workload,
                "server": server,
                "num_rounds": len(own),
                "num_not_ok": sum(one["num_requests"] - one["num_ok"] for one in figures),
                "medians": {name: _median(figures, place) for name, place, _, _ in FIGURES},
            }
        )
    firsts = {row["workload"]: row["medians"] for row in rows if row["server"] == first}
    for row in rows:
        ours = firsts.get(row["workload"], {})
        row["first_is_better"] = (
            {}
            if row["server"] == first
            else {name: _times(ours.get(name), row["medians"][name], more) for name, _, more, _ in FIGURES}
        )
    return rows


def _median(figures: Sequence[Row], place: Sequence[str]) -> float | None:
    found = []
    for one in figures:
        value: Any = one
        for name in place:
            value = value[name] if value is not None else None
        found += [value] if value is not None else []
    return statistics.median(found) if found else None


def _times(ours: float | None, theirs: float | None, more: bool) -> float | None:
    """How many times better ours is, whichever way the figure points."""
    if not ours or not theirs:
        return None
    return ours / theirs if more else theirs / ours


def markdown(document: Row) -> str:
    machine = document["machine"]
    parts = [
        f"# Servers compared, {document['started'][:10]}\n\n{machine['cpu']}, {machine['cores']} cores; "
        f"{'taking turns' if document['together'] else 'one after the other'}, median of {document['rounds']} "
        f"rounds; commit {(document['commit'] or 'unknown')[:10]}"
        f"{' with changes' if document['changed'] else ''}."
    ]
    for workload in dict.fromkeys(row["workload"] for row in document["summary"]):
        rows = [row for row in document["summary"] if row["workload"] == workload]
        parts.append(f"## {workload}\n\n" + _medians(rows))
        if len(rows) > 1:
            parts.append(f"How many times better {document['first']} is:\n\n" + _ratios(rows))
    parts.append("\n".join(f"* {note}" for note in _notes(document)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _medians(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["server"],
            *("" if (value := row["medians"][name]) is None else form.format(value) for name, _, _, form in FIGURES),
            str(row["num_not_ok"]),
        ]
        for row in rows
    ]
    return table(["server", *(name for name, _, _, _ in FIGURES), "not ok"], lines)


def _ratios(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"than {row['server']}",
            *("" if (value := row["first_is_better"][name]) is None else f"{value:.2f}×" for name, _, _, _ in FIGURES),
        ]
        for row in rows
        if row["first_is_better"]
    ]
    return table(["", *(name.removesuffix(", s") for name, _, _, _ in FIGURES)], lines)


def _notes(document: Row) -> list[str]:
    found = [*document["notes"]]
    found += busy_notes((rest["busy_share"] for rest in document["rests"]), "servers")
    found += [f"{name} was skipped: {why}." for name, why in document["absent"].items()]
    found += [
        f"{failure['server']} failed{', ' + failure['workload'] if failure['workload'] else ''}: {failure['error']}"
        for failure in document["failures"]
    ]
    found += [
        f"{name}: version {facts['version'] or 'unknown'}, ready after {facts['started_s']:.1f} s."
        for name, facts in document["servers"].items()
    ]
    return found
