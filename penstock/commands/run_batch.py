"""`penstock run-batch`: a file of requests in OpenAI's batch format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.commands.flags.options import engine_options
from penstock.commands.output import write_note
from penstock.commands.serve import Models, name_models
from penstock.errors import InvalidRequest
from penstock.host.interrupts import INTERRUPTED

Input = Annotated[Path, typer.Argument(metavar="INPUT", hidden=True)]
OutputFile = Annotated[Path, typer.Option("-o", "--output", help="File to append answers to, one per line.")]


@engine_options("skip_tokenizer_init")
def run_batch(input: Input, output: OutputFile, models: Models = None, *, options: dict[str, Any]) -> None:
    """Answer a file of requests in OpenAI's batch format.

    INPUT has one request per line: custom_id, method, url and body. Each answer is appended to OUTPUT when it is
    complete; run again with the same OUTPUT to resume. The exit status is 1 if any request failed.
    """
    from penstock.server.batch.entries import OutputFile
    from penstock.server.batch.run import run_batch as run

    if not input.is_file():
        raise InvalidRequest(f"there is no file {input}: give one with a request per line")
    named = name_models(models or ["smollm2"])
    with OutputFile(output) as file:
        num_before = file.num_lines
        status = run(input, file, named, options)
        num_new = file.num_lines - num_before
        before = f"{num_before} were there before, " if num_before else ""
        stopped = "; run it again to go on" if status == INTERRUPTED else ""
        write_note(f"{before}{num_new} added, {file.num_failed} failed: {output}{stopped}")
    raise typer.Exit(status)
