"""A run on a GPU as a picture: `python -m bench.gpu_plot bench/results/gpu-*.json docs/bench-gpu.svg`.

One panel per model, one pair of bars per request set: the rival's and ours, with the target as a tick across ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu_sets import KINDS, RIVAL, SHAPE_TITLES, START, TITLES, rival, target
from bench.picture import pyplot, save

OURS, THEIRS, TARGET = "#d1495b", "#9a9a9a", "#222222"
THICK = 0.38
Document = dict[str, Any]
Model = tuple[str, str]  # shape and quantization


def cases(documents: Sequence[Document]) -> dict[Model, dict[str, float]]:
    """Tokens per second of each model and request set; of several files the last one holds."""
    found: dict[Model, dict[str, float]] = {}
    for document in documents:
        for case in document["cases"]:
            plain = not (set(case) & {"kv_cache_dtype", "deterministic", "enforce_eager"})
            if plain and case["kind"] in KINDS:
                found.setdefault((case["shape"], case.get("quantization") or "bf16"), {})[case["kind"]] = case[
                    "out_tok_s"
                ]
    return found


def starts(documents: Sequence[Document]) -> dict[Model, float]:
    """Seconds to ready; those without compiled kernels where they were measured. The last file holds."""
    found: dict[Model, float] = {}
    for document in documents:
        started = [case for case in document["cases"] if case["kind"] == START]
        for case in sorted(started, key=lambda case: case.get("triton_cache") == "cold"):
            found[case["shape"], case.get("quantization") or "bf16"] = case["ready_s"]
    return found


def draw(documents: Sequence[Document], path: Path) -> None:
    found, ready = cases(documents), starts(documents)
    models = sorted(found, key=lambda model: (list(SHAPE_TITLES).index(model[0]), model[1]))
    figure, panels = pyplot().subplots(
        1, len(models), squeeze=False, sharey=True, layout="constrained", figsize=(2.2 + 4.1 * len(models), 3.9)
    )
    for panel, model in zip(panels[0], models):
        _panel(panel, model, found[model], ready.get(model))
    panels[0][0].set_yticks(range(len(KINDS)), [TITLES[kind] for kind in KINDS], fontsize=8)
    panels[0][0].set_ylim(len(KINDS) - 0.45, -0.55)
    last = documents[-1]
    figure.suptitle(
        f"One {last['device']}, random weights, temperature 1: output tokens per second (higher is better)", fontsize=10
    )
    figure.legend(handles=_legend(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, path)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color=OURS, label=f"Penstock, × {RIVAL}"),
        Patch(color=THEIRS, label=RIVAL),
        Line2D(
            [],
            [],
            color=TARGET,
            marker="|",
            markersize=9,
            markeredgewidth=1.6,
            linestyle="none",
            label="target, at least",
        ),
    ]


def _panel(panel: Any, model: Model, figures: dict[str, float], ready: float | None) -> None:
    shape, quantization = model
    values = []
    for at, kind in enumerate(KINDS):
        ours, theirs, wanted = figures.get(kind), rival(*model, kind), target(*model, kind)
        if theirs:
            panel.barh(at - THICK / 2, theirs, THICK, color=THEIRS)
            panel.text(theirs * 1.07, at - THICK / 2, f"{theirs:,.0f}", va="center", fontsize=7, color="#666666")
        if ours:
            panel.barh(at + THICK / 2, ours, THICK, color=OURS)
            ratio = f"  {ours / theirs:.2f}×" if theirs else ""
            end = max(ours, wanted or 0)
            panel.text(end * 1.07, at + THICK / 2, f"{ours:,.0f}{ratio}", va="center", fontsize=7, weight="bold")
        if wanted:
            panel.plot([wanted, wanted], [at + 0.01, at + THICK - 0.01], color=TARGET, linewidth=1.6)
        values += [value for value in (ours, theirs, wanted) if value]
    panel.set_xscale("log")
    if values:
        panel.set_xlim(min(values) / 2.2, max(values) * 5)
    start = f"; first token {ready:.0f} s after the start" if ready else ""
    panel.set_title(f"{SHAPE_TITLES.get(shape, shape)}, {quantization}{start}", fontsize=9)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.tick_params(labelsize=7)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", which="major", linewidth=0.4, color="#dddddd")
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_plot", description="Draw runs of bench.gpu.")
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of bench.gpu; later ones hold")
    parser.add_argument("picture", type=Path, help="an .svg or .png file")
    chosen = parser.parse_args(words)
    if chosen.picture.suffix not in (".svg", ".png"):
        parser.error(f"{chosen.picture} is no picture: the last argument must end in .svg or .png")
    try:
        draw([json.loads(path.read_text(encoding="utf-8")) for path in chosen.results], chosen.picture)
    except ImportError as error:
        print(f"error: no plot was drawn ({error}); pip install 'penstock[bench]'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
