"""A command whose help fits a screen: flags in groups, and rarely used groups by name alone."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from penstock.commands.flags.groups import FOREMOST, MACHINES, RARE
from penstock.commands.flags.spelling import normalize

SAMPLING, STRUCTURE = "Sampling", "Form of the answer"
RARE_SAMPLING, ENGINE = "More sampling", "Engine"
LIMITS, SPEECH, LOG = "Limits", "API", "Log"  # of the server
NAMES_ALONE = (RARE_SAMPLING, SPEECH, LIMITS, LOG, ENGINE)  # groups that --help lists and --help-all explains
ALL = "--help-all"
VALUES = {"int": "N", "float": "X"}  # how help names a value of a type; TEXT for any other
USAGE_ERROR: Any = typer.BadParameter.__base__  # click's UsageError: typer vendors click


class Command(TyperCommand):
    """A command with a stable usage line and flags in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, normalize(args, {name for param in self.params for name in param.opts}))
        except USAGE_ERROR as error:
            if "unexpected extra argument" in error.message and any("--model" in param.opts for param in self.params):
                error.message += ": name each further model with --model, and repeat an option for each further value"
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [str(parameter.metavar) for parameter in self.params if parameter.param_type_name == "argument"]
        return ["[OPTIONS]", *arguments]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        names: dict[str, list[str]] = {}
        explains_all = bool(ctx.meta.get(ALL))
        params: list[Any] = self.get_params(ctx)
        is_hiding = any(param.name == HELP_ALL.name for param in params)
        foremost = () if any(getattr(param, "rich_help_panel", None) == SAMPLING for param in params) else FOREMOST
        for param in params:
            panel = getattr(param, "rich_help_panel", None) or "Options"
            if is_hiding and not explains_all and _is_rare(param.name, panel, foremost):
                if param.name not in MACHINES:
                    names.setdefault(panel, []).append(next(name for name in param.opts if name.startswith("--")))
                continue
            if panel == ENGINE:
                param.hidden = False  # a command that hides them takes them too
            if (record := param.get_help_record(ctx)) is not None:
                flags, text = record
                groups.setdefault(panel, []).append((shorten_flags(flags), text.replace("  [", " [")))
        for panel, records in groups.items():
            with formatter.section(panel):
                formatter.write_dl(records)
        if names:
            with formatter.section(f"More ({ALL} explains)"):
                for panel, listed in names.items():
                    formatter.write(_wrap(panel, listed, formatter.width))


def _is_rare(name: str, panel: str, foremost: Sequence[str]) -> bool:
    """Tell if help lists an option by name alone."""
    return name in RARE or panel in NAMES_ALONE and name not in foremost


def shorten_flags(flags: str) -> str:
    """Write a switch as `--[no-]name`, and a value by one short word."""
    flags = re.sub(r"--([\w-]+) / --no-\1", r"--[no-]\1", flags)
    return re.sub(r"<(?:list\[)?(\w+)]?>", lambda found: VALUES.get(found[1], "TEXT"), flags)


def _wrap(panel: str, names: list[str], width: int) -> str:
    text = f"{panel}: {' '.join(names)}"
    lines = textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    return "".join(f"{line}\n" for line in lines)


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[ALL] = True
        print(ctx.get_help())
        raise typer.Exit()


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        bool | None, typer.Option(ALL, help="Explain every option.", is_eager=True, callback=_show_all)
    ],
)
