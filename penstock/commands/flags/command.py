"""A command whose help fits a screen: flags in groups, and rarely used groups by name alone."""

from __future__ import annotations

import inspect
import textwrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from penstock.commands.flags.groups import MACHINES
from penstock.commands.flags.spelling import normalize

SAMPLING, STRUCTURE = "Sampling", "Form of the answer"
RARE_SAMPLING, ENGINE = "More sampling", "Engine"
LIMITS, SPEECH, LOG = "Limits", "API", "Log"  # of the server
NAMES_ALONE = (RARE_SAMPLING, SPEECH, LIMITS, LOG, ENGINE)  # groups that --help lists and --help-all explains
ALL = "--help-all"


class Command(TyperCommand):
    """A command with a stable usage line and flags in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, normalize(args, {name for param in self.params for name in param.opts}))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [str(parameter.metavar) for parameter in self.params if parameter.param_type_name == "argument"]
        return ["[OPTIONS]", *arguments]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        names: dict[str, list[str]] = {}
        explains_all = bool(ctx.meta.get(ALL))
        params: list[Any] = self.get_params(ctx)
        for param in params:
            panel = getattr(param, "rich_help_panel", None) or "Options"
            if panel in NAMES_ALONE and not explains_all:
                if param.name not in MACHINES:
                    names.setdefault(panel, []).append(next(name for name in param.opts if name.startswith("--")))
                continue
            if panel == ENGINE:
                param.hidden = False  # a command that hides them takes them too
            if (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(panel, []).append(record)
        for panel, records in groups.items():
            with formatter.section(panel):
                formatter.write_dl(records)
        for panel, listed in names.items():
            with formatter.section(f"{panel} ({ALL} explains)"):
                formatter.write(_wrap(listed, formatter.width - 4))


def _wrap(names: list[str], width: int) -> str:
    lines = textwrap.wrap(" ".join(names), width, break_on_hyphens=False)
    return "".join(f"  {line}\n" for line in lines)


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
