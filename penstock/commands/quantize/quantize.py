"""`penstock quantize`: make a smaller model of one."""

from __future__ import annotations

import inspect
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.commands.flags.options import Json, add_flags
from penstock.commands.output import write_note
from penstock.commands.perplexity import read_text
from penstock.commands.quantize.quality import HELD_OUT, Speed, show_report, write_page
from penstock.errors import InvalidConfig, InvalidRequest, PenstockError
from penstock.host.progress import block_bar

if TYPE_CHECKING:
    from penstock.quantize.report.figures import QualityReport, Speeds
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
BUNDLED = "calibration.txt"


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
    model: Source,
    out: Out,
    calibration: Calibration = None,
    speed: Speed = True,
    as_json: Json = False,
    *,
    recipe: dict[str, Any],
) -> None:
    """Make a smaller model of one, and report what it loses.

    OUT is a new folder, or a new .gguf file. One block of the model is in memory at a time. A run that was stopped
    goes on when it is repeated. The report is printed, and a page with plots lies beside the result.
    """
    from penstock.api.model_files import find_model

    text = _read_calibration(calibration)
    source = str(find_model(model, None, sys.stderr.isatty()).absolute())  # bare, it may be a model's short name
    made = _make(Path(source), out, recipe, text, is_calibrated=calibration != "none")
    again = shlex.join(["penstock", "quality", model, str(out.resolve())])
    try:
        report = _compare(source, made)
    except PenstockError as error:
        write_note(f"{out} is complete; no report: {error}; run {again}")
        return
    report.first, report.second = model, str(out)
    show_report(report, as_json, partial(_measure_speeds, source, out) if speed else None)
    try:
        write_page(report, out / "quality.html" if out.is_dir() else out.with_suffix(".quality.html"), "x")
    except InvalidRequest as error:
        write_note(f"{out} is complete; no page with plots: {error}; run {again} --html FILE")


def _compare(source: str, made: Made) -> QualityReport:
    from penstock.api.quality.measure import measure_quality, read_bundled

    with block_bar(sys.stderr.isatty(), "Comparing") as progress:
        report = measure_quality(
            source, str(made.out.resolve()), read_bundled(HELD_OUT), "bundled held-out text", progress=progress
        )
    report.errors = made.errors
    return report


def _measure_speeds(source: str, out: Path) -> Speeds | None:
    """Measure on the CPU, where the model was made."""
    from penstock.api.quality.measure import measure_speeds

    try:
        return measure_speeds(source, str(out.resolve()), "cpu")
    except PenstockError as error:
        write_note(f"{out} is complete; no speeds: {error}")
        return None


def _read_calibration(calibration: str | None) -> str:
    from penstock.api.quality.measure import read_bundled

    if calibration in (None, "none"):
        return read_bundled(BUNDLED)
    text = read_text(Path(str(calibration)))
    if not text.strip():
        raise InvalidConfig(f"the calibration text {calibration} is empty: give one with a few thousand words")
    return text


def _make(path: Path, out: Path, recipe: dict[str, Any], text: str, is_calibrated: bool) -> Made:
    from penstock.api.quality.measure import read_bundled, tokenizer_of
    from penstock.models.files import open_checkpoint
    from penstock.quantize.run import quantize as run
    from penstock.quantize.targets import make_target

    checkpoint = open_checkpoint(path)
    try:
        tokens = None
        if is_calibrated:
            tokenizer = tokenizer_of(path, checkpoint)
            tokens = tokenizer.encode(text, add_special_tokens=False)[:MAX_CALIBRATION]
            tokenizer.program.rest()
        with block_bar(sys.stderr.isatty(), "Quantizing") as progress:
            target, group = make_target(**recipe), recipe.get("group_size")
            made = run(
                checkpoint, out, target, tokens, group_size=group, sample=read_bundled(BUNDLED), progress=progress
            )
    finally:
        checkpoint.close()
    if made.resumed_from:
        write_note(f"Went on after block {made.resumed_from}, which an earlier run had finished.")
    return made
