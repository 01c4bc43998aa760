"""`penstock quantize`: make a smaller model of one."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.commands.flags.options import Json, add_flags
from penstock.commands.output import write_note
from penstock.commands.perplexity import read_text
from penstock.commands.quantize.quality import HELD_OUT, show_report
from penstock.errors import InvalidConfig
from penstock.host.progress import block_bar

if TYPE_CHECKING:
    from penstock.quantize.run import Made

Source = Annotated[str, typer.Argument(metavar="MODEL", hidden=True)]
Out = Annotated[Path, typer.Argument(metavar="OUT", hidden=True)]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration", help="UTF-8 text to learn from, or none. [default: a bundled one]", show_default=False
    ),
]
MAX_CALIBRATION = 32768  # tokens


def _flag(name: str, kind: Any, text: str, is_required: bool = False) -> inspect.Parameter:
    dashed = name.replace("_", "-")
    option = typer.Option(
        f"--{dashed}/--no-{dashed}" if kind == bool | None else f"--{dashed}", help=text, show_default=False
    )
    default = inspect.Parameter.empty if is_required else None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )  # fmt: skip


RECIPE = [
    _flag("scheme", str, "int4, int8, w8a8, fp8 or bf16 (a folder); gguf:Q4_K_M, gguf:Q8_0 … (a file).", True),
    _flag(
        "method",
        str | None,
        "rtn, gptq, awq, smoothquant or hqq. [default: gptq for int4, smoothquant for w8a8, else rtn]",
    ),
    _flag("group_size", int | None, "Inputs that share a scale; 0: all. [default: 128, 64 or 32 for int4; 0 for int8]"),
    _flag("act_order", bool | None, "gptq: round the inputs that matter most first. [default: yes]"),
    _flag("sparsity", str | None, "Share of weights to make zero: none, 0.5 or 2:4. [default: none]"),
    _flag("prune", str | None, "Choose them by wanda, sparsegpt or magnitude. [default: wanda]"),
]


def _read_recipe(given: dict[str, Any]) -> dict[str, Any]:
    """Check the names before a model is opened."""
    from penstock.quantize.targets import make_target

    make_target(**given)
    return given


@add_flags(RECIPE, "recipe", _read_recipe)
def quantize(
    model: Source, out: Out, calibration: Calibration = None, as_json: Json = False, *, recipe: dict[str, Any]
) -> None:
    """Make a smaller model of one, and report what it loses.

    OUT is a new folder, or a new .gguf file. One block of the model is in memory at a time. A run that was stopped
    goes on when it is repeated. The report is printed, and a page with plots lies beside the result.
    """
    made = _make(model, out, recipe, calibration)
    from penstock.api.quality.measure import measure_quality, read_bundled

    with block_bar(sys.stderr.isatty(), "Comparing") as progress:
        report = measure_quality(model, str(out), read_bundled(HELD_OUT), "bundled held-out text", progress=progress)
    report.errors = made.errors
    show_report(report, out / "quality.html" if out.is_dir() else out.with_suffix(".quality.html"), as_json)


def _make(model: str, out: Path, recipe: dict[str, Any], calibration: str | None) -> Made:
    from penstock.api.model_files import find_model
    from penstock.api.quality.measure import read_bundled, tokenizer_of
    from penstock.models.files import open_checkpoint
    from penstock.quantize.run import quantize as run
    from penstock.quantize.targets import make_target

    bundled = read_bundled("calibration.txt")
    text = bundled if calibration in (None, "none") else read_text(Path(str(calibration)))
    if not text.strip():
        raise InvalidConfig(f"the calibration text {calibration} is empty: give one with a few thousand words")
    path = find_model(model, None, sys.stderr.isatty())
    checkpoint = open_checkpoint(path)
    try:
        tokens = None
        if calibration != "none":
            tokenizer = tokenizer_of(path, checkpoint)
            tokens = tokenizer.encode(text, add_special_tokens=False)[:MAX_CALIBRATION]
            tokenizer.program.rest()
        with block_bar(sys.stderr.isatty(), "Quantizing") as progress:
            target, group = make_target(**recipe), recipe.get("group_size")
            made = run(checkpoint, out, target, tokens, group_size=group, sample=bundled, progress=progress)
    finally:
        checkpoint.close()
    if made.resumed_from:
        write_note(f"Went on after block {made.resumed_from}, which an earlier run had finished.")
    return made
