"""A command whose help fits a screen: flags in groups, and rarely used groups by name alone."""

from __future__ import annotations

import inspect
import textwrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from penstock.commands.flags.groups import MACHINES
from penstock.config.cache_dtypes import WINDOWS

SAMPLING, STRUCTURE = "Sampling", "Form of the answer"
RARE_SAMPLING, ENGINE = "More sampling", "Engine"
LIMITS, SPEECH, LOG = "Limits", "API", "Log"  # of the server
NAMES_ALONE = (RARE_SAMPLING, SPEECH, LIMITS, LOG, ENGINE)  # groups that --help lists and --help-all explains
ALL = "--help-all"
MODULES, LAYERS = "--lora-modules", "--kv-cache-dtype-skip-layers"


class Command(TyperCommand):
    """A command with a stable usage line and flags in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, join_layers(spread_modules(args)))

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


def spread_modules(args: list[str]) -> list[str]:
    """Repeat --lora-modules before each adapter: vLLM's takes several."""
    spread: list[str] = []
    names_modules = False
    for arg in args:
        is_module = "=" in arg and not arg.startswith("-") or arg.startswith(("{", "["))
        if names_modules and is_module and spread[-1] != MODULES:
            spread.append(MODULES)
        names_modules = arg == MODULES or names_modules and is_module
        spread.append(arg)
    return spread


def join_layers(args: list[str]) -> list[str]:
    """Join the values of --kv-cache-dtype-skip-layers by commas: vLLM's takes several."""
    joined: list[str] = []
    for arg in args:
        names_layers = arg.isdigit() or arg == WINDOWS
        if names_layers and len(joined) > 1 and joined[-2] == LAYERS:
            joined[-1] += f",{arg}"
        else:
            joined.append(arg)
    return joined


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
