"""The immutable Jinja sandbox that chat templates run in, with the functions published templates expect.

Imported only when a template is compiled, so that nothing else needs Jinja.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_ITEMS = 1 << 24  # characters or items that an operator may produce
MAX_BITS = 1 << 12  # of a number
MAX_TURNS = 1 << 17  # iterations over all loops and macros; a second or two
TICK = "__tick"


def sandbox() -> ImmutableSandboxedEnvironment:
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals.update(raise_exception=_refuse, strftime_now=_strftime_now, namespace=_namespace)
    del made.globals["lipsum"]
    return made


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounds what operators produce, and counts loop iterations so that templates end."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro)):
            count = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))  # type: ignore[attr-defined]
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _num_items(operator, left, right) > MAX_ITEMS:
            raise SecurityError(f"a value exceeds {MAX_ITEMS} characters or items")
        return super().call_binop(context, operator, left, right)


class LoopCounter:
    """Counts the loop iterations of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_TURNS

    def __call__(self) -> str:
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"its loops exceed {MAX_TURNS} iterations")
        return ""


def _num_items(operator: str, left: Any, right: Any) -> int:
    """Bound the size of an operator's result before computing it; numbers count only if huge."""
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
        return MAX_ITEMS + 1 if operator in ("*", "**") and num_bits > MAX_BITS else 0
    if operator == "*":
        count, items = (left, right) if isinstance(left, int) else (right, left)
        return count * len(items) if isinstance(count, int) and hasattr(items, "__len__") else 0
    if operator == "%" and isinstance(left, str):
        widths = re.findall(r"%[^a-zA-Z%]*?(\*|\d+)", left)
        return sum(MAX_ITEMS + 1 if width == "*" else int(width[:9]) for width in widths)
    return sum(len(side) for side in (left, right) if hasattr(side, "__len__")) if operator == "+" else 0


class _Generation(Extension):
    """{% generation %} marks what the model wrote; in a prompt it yields its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _namespace(*tables: Any, **values: Any) -> Namespace:
    made = _PublicNamespace()
    for name, value in dict(*tables, **values).items():
        made[name] = value
    return made


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
