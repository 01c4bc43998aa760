"""`penstock quality`: measure what one model loses against another."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.commands.flags.options import Json
from penstock.commands.output import Table, write_note, write_text
from penstock.commands.perplexity import read_text
from penstock.errors import InvalidRequest
from penstock.host.progress import block_bar

if TYPE_CHECKING:
    from penstock.quantize.report.figures import QualityReport, Speeds

First = Annotated[str, typer.Argument(metavar="A", hidden=True)]
Second = Annotated[str, typer.Argument(metavar="B", hidden=True)]
TextFile = Annotated[
    Path | None, typer.Option("--text", help="UTF-8 text to predict. [default: a bundled one]", show_default=False)
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Score only the first tokens. [default: 4096]")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page with plots to this file.", show_default=False)]
Speed = Annotated[bool, typer.Option("--speed/--no-speed", help="Measure how fast both decode.")]
HELD_OUT = "held_out.txt"


def quality(
    first: First,
    second: Second,
    text: TextFile = None,
    max_tokens: MaxTokens = None,
    html: Html = None,
    speed: Speed = True,
    as_json: Json = False,
) -> None:
    """Measure what model B loses against model A.

    Both predict the same text. The report has the perplexities, the divergence of B's distributions from A's, the
    share of equal first choices, the layers that differ most, sizes and decode speeds.
    """
    from penstock.api.quality.measure import measure_quality, measure_speeds, read_bundled

    read, named = (read_bundled(HELD_OUT), "bundled held-out text") if text is None else (read_text(text), str(text))
    with block_bar(sys.stderr.isatty(), "Comparing") as progress:
        report = measure_quality(first, second, read, named, max_tokens=max_tokens, progress=progress)
    show_report(report, as_json, partial(measure_speeds, first, second) if speed else None)
    if html is not None:
        write_page(report, html, "w")


def show_report(report: QualityReport, as_json: bool, measure: Callable[[], Speeds | None] | None) -> None:
    """Print a report, and then what `measure` adds: a large model may not fit there, or take long."""
    if not as_json:
        write_text(_table(report.rows()) + "".join(f"{note}\n" for note in report.notes()))
    if measure is not None:
        report.speeds = measure()
    write_text(json.dumps(report.document(), indent=2) + "\n" if as_json else _table(report.speed_rows()))


def _table(rows: list[tuple[str, str, str]]) -> str:
    table = Table()
    for row in rows:
        table.add(*row)
    return table.plain() if rows else ""


def write_page(report: QualityReport, path: Path, mode: Literal["w", "x"]) -> None:
    """Write the page with plots; "x" keeps a file that is there."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(report.page())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written ({error.strerror}): name a file you may write") from None
    write_note(f"Plots: {path}")
