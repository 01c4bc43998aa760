"""`penstock quality`: measure what one model loses against another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands.flags.options import Json
from penstock.commands.output import Table, write_note, write_text
from penstock.commands.perplexity import read_text
from penstock.errors import InvalidRequest
from penstock.host.progress import block_bar

if TYPE_CHECKING:
    from penstock.quantize.report.figures import QualityReport

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
    from penstock.api.quality.measure import measure_quality, read_bundled

    read, named = (read_bundled(HELD_OUT), "bundled held-out text") if text is None else (read_text(text), str(text))
    with block_bar(sys.stderr.isatty(), "Comparing") as progress:
        report = measure_quality(first, second, read, named, max_tokens=max_tokens, speed=speed, progress=progress)
    show_report(report, html, as_json)


def show_report(report: QualityReport, html: Path | None, as_json: bool) -> None:
    """Print a report, and write its page where one is wanted."""
    if html is not None:
        write_page(report, html)
    if as_json:
        write_text(json.dumps(report.document(), indent=2) + "\n")
        return
    table = Table()
    for row in report.rows():
        table.add(*row)
    write_text(table.plain() + "".join(f"{note}\n" for note in report.notes()))
    if html is not None:
        write_note(f"Plots: {html}")


def write_page(report: QualityReport, path: Path) -> None:
    try:
        path.write_text(report.page(), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written ({error.strerror}): name a file you may write") from None
