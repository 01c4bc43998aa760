"""TTFT and TPOT over the request rate, a line per server: p50 solid, p99 dashed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.picture import pyplot, save

Row = dict[str, Any]
PANELS = (("ttft", "TTFT, ms"), ("tpot", "TPOT, ms"))
PARTS = (("p50", "-"), ("p99", "--"))


def read(paths: Iterable[Path]) -> list[Row]:
    """Return the lines of all files; of the same case of a server the last one holds."""
    found: dict[tuple[str, str, str], Row] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found[row["server"], row["model"], row["case"]] = row
    return list(found.values())


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return each server's rows that have a rate and an answer, by rising rate."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("rate") and row.get("tpot_p50_ms") is not None:
            found.setdefault(f"{row['server']}, {row['model']}", []).append(row)
    return {name: sorted(own, key=lambda row: float(row["rate"])) for name, own in found.items()}


def draw(rows: Sequence[Row], path: Path) -> None:
    found = curves(rows)
    if not found:
        raise ValueError("no line has a rate and latencies: run rate-10, rate-20 and rate-28 first")
    figure, panels = pyplot().subplots(1, len(PANELS), layout="constrained", figsize=(9, 3.6))
    for panel, (name, title) in zip(panels, PANELS):
        for number, (server, own) in enumerate(found.items()):
            rates = [row["rate"] for row in own]
            for part, style in PARTS:
                values = [row[f"{name}_{part}_ms"] for row in own]
                panel.plot(
                    rates, values, style, marker="o", markersize=3, color=f"C{number}", label=f"{server}, {part}"
                )
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("requests per second", fontsize=8)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
        panel.tick_params(which="both", labelsize=7)
        panel.grid(which="major", linewidth=0.4, color="#dddddd")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize=7, frameon=False)
    save(figure, path)
