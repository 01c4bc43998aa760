"""A run's results as a picture: one panel per case, one bar per engine and file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.cases import TITLES
from bench.picture import pyplot, save
from bench.report import ENGINE_TITLES

Row = dict[str, Any]
COLOURS = {"penstock": "#d1495b", "llamacpp": "#30638e", "llamacpp-by-hand": "#7aa6c9"}
OTHER = "#9a9a9a"


def draw(document: Row, path: Path) -> None:
    """Models from top to bottom, cases from left to right."""
    rows = document["summary"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    bars = [max(1, len({(row["engine"], row["file"]) for row in rows if row["model"] == model})) for model in models]
    figure, panels = pyplot().subplots(
        len(models),
        len(cases),
        squeeze=False,
        layout="constrained",
        figsize=(2.1 * len(cases) + 2.6, 0.26 * sum(bars) + 1.1 * len(models) + 0.6),
        height_ratios=[count + 2 for count in bars],
    )
    for line, model in zip(panels, models):
        of_model = [row for row in rows if row["model"] == model]
        names = list(dict.fromkeys((row["engine"], row["file"]) for row in of_model))
        for panel, case in zip(line, cases):
            found = {(row["engine"], row["file"]): row for row in of_model if row["case"] == case}
            panel.set_visible(bool(found) or panel is line[0])  # the first one carries the names
            _panel(panel, names, found)
            panel.set_title(TITLES.get(case, case), fontsize=9)
            panel.set_yticklabels([])
        labels = [f"{ENGINE_TITLES.get(engine, engine)}  {file}" for engine, file in names]
        line[0].set_yticks(range(len(names)), labels, fontsize=7)
    figure.suptitle(
        f"{document['machine']['cpu']}, {document['threads']} threads, {document['cpu_mode']}: tokens per "
        "second (higher is better); seconds where it says s (lower is better)",
        fontsize=10,
    )
    save(figure, path)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _panel(panel: Any, names: list[tuple[str, str]], found: dict[tuple[str, str], Row]) -> None:
    for at, name in enumerate(names):
        row = found.get(name)
        if row is None:
            continue
        spread = [[row["median"] - row["low"]], [row["high"] - row["median"]]]
        panel.barh(at, row["median"], color=COLOURS.get(name[0], OTHER), xerr=spread, error_kw={"linewidth": 0.8})
        panel.text(row["high"], at, f" {_short(row['median'])}", va="center", fontsize=6.5)
    panel.set_yticks(range(len(names)))
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.margins(x=0.25)
    panel.tick_params(labelsize=6.5)
    panel.spines[["top", "right"]].set_visible(False)
