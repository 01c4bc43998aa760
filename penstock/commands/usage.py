"""A command's usage line: its arguments as they were named, whatever the installed typer would make of them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [str(parameter.metavar) for parameter in self.params if parameter.param_type_name == "argument"]
        return ["[OPTIONS]", *arguments]
