"""Ops by themselves as a picture: `python -m bench.ops_plot bench/results/ops-DATE.json docs/bench-ops.svg`.

How near each op comes to the least time that the device's own copies and matrix products leave it: a row of panels for
each model, products by the number of rows, attention of single queries by the length of the text.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.picture import pyplot, save

PANELS = {
    "product": "products, bfloat16",
    "fp8_product": "8-bit floats",
    "8 bits": "8-bit integers",
    "4 bits": "4-bit integers",
    "attention": "attention, single queries",
}
SHAPES = {"8b": "Llama 3.1 8B", "0.6b": "Qwen3 0.6B"}
COLOURS = ("#d1495b", "#30638e", "#edae49", "#00798c", "#8d6a9f")
PRODUCT = re.compile(r"(?:(?P<bits>\d bits), )?(?P<line>\w+) \d+×\d+, (?P<at>\d+) rows")
SINGLES = re.compile(r"(?P<line>\d+) rows at (?P<at>\d+)")
Lines = dict[str, dict[int, float]]  # by what is multiplied, or how many: a share for each place


def lines_of(cases: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Lines]:
    """Of each shape and panel; cases that no panel has are left out."""
    found: dict[tuple[str, str], Lines] = {}
    for case in cases:
        match = (SINGLES if case["op"] == "attention" else PRODUCT).fullmatch(case["case"])
        if match is None:
            continue
        panel = match.groupdict().get("bits") or case["op"]
        name = match["line"] if panel != "attention" else f"{match['line']} sequence" + "s" * (match["line"] != "1")
        if panel in PANELS:
            lines = found.setdefault((case["shape"], panel), {})
            lines.setdefault(name, {})[int(match["at"])] = case["share_of_floor"]
    return found


def draw(document: dict[str, Any], path: Path) -> None:
    found = lines_of(document["cases"])
    shapes = [shape for shape in SHAPES if any(shape == one for one, _ in found)]
    kinds = [kind for kind in PANELS if any(kind == one for _, one in found)]
    figure, panels = pyplot().subplots(
        len(shapes),
        len(kinds),
        squeeze=False,
        sharey=True,
        layout="constrained",
        figsize=(1 + 2.5 * len(kinds), 0.8 + 2.5 * len(shapes)),
    )
    for row, shape in zip(panels, shapes):
        for panel, kind in zip(row, kinds):
            _panel(panel, found.get((shape, kind), {}), f"{SHAPES[shape]}: {PANELS[kind]}", kind == "attention")
        row[0].set_ylabel("least time / time", fontsize=8)
    figure.suptitle(
        f"One {document['device']}: ops by themselves, beside what its own copies ({document['copy_tb_s']} "
        f"TB/s) and matrix products ({document['bf16_tflop_s']} TFLOP/s) allow",
        fontsize=10,
    )
    save(figure, path)


def _panel(panel: Any, lines: Lines, title: str, by_length: bool) -> None:
    for colour, (name, places) in zip(COLOURS, lines.items()):
        ends = sorted(places.items())
        panel.plot(
            [at for at, _ in ends],
            [share for _, share in ends],
            color=colour,
            marker="o",
            markersize=3,
            linewidth=1.2,
            label=name,
        )
    panel.axhline(1.0, color="#222222", linewidth=0.8, linestyle=":")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.set_ylim(0, 1.2)
    panel.yaxis.set_major_formatter("{x:.0%}")
    panel.set_title(title, fontsize=8)
    panel.set_xlabel("keys of a sequence" if by_length else "rows", fontsize=7)
    panel.tick_params(labelsize=6)
    panel.grid(linewidth=0.4, color="#dddddd")
    panel.spines[["top", "right"]].set_visible(False)
    if lines:
        panel.legend(fontsize=6, frameon=False)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ops_plot", description="Draw a run of bench.ops.")
    parser.add_argument("results", type=Path, help="the JSON file of bench.ops")
    parser.add_argument("picture", type=Path, help="an .svg or .png file")
    chosen = parser.parse_args(words)
    if chosen.picture.suffix not in (".svg", ".png"):
        parser.error(f"{chosen.picture} is no picture: the last argument must end in .svg or .png")
    try:
        document = json.loads(chosen.results.read_text(encoding="utf-8"))
        lacking = [name for name in ("device", "copy_tb_s", "bf16_tflop_s", "cases") if name not in document]
        if lacking or not lines_of(document["cases"]):
            raise ValueError(f"it has no {', '.join(lacking) or 'products and no attention'}")
    except (OSError, ValueError) as error:
        print(f"error: {chosen.results} is no result of bench.ops: {error}", file=sys.stderr)
        return 1
    try:
        draw(document, chosen.picture)
    except (ImportError, OSError) as error:
        remedy = "; pip install 'penstock[bench]'" if isinstance(error, ImportError) else ""
        print(f"error: no plot was drawn ({error}){remedy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
