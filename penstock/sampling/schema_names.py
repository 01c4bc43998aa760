"""The names that `propertyNames` allows, as an expression or as a list."""

from __future__ import annotations

from typing import Any

from penstock.sampling.schema_not import MAX_LENGTH, Follow, as_list, assertions, escape, other_strings
from penstock.sampling.schema_strings import refusal

MAX_DEPTH = 4


def name_expression(schema: Any, follow: Follow, depth: int = 0) -> str | list[str] | None:
    """An expression, or all the names; "" where every name will do, None where it cannot be said."""
    if isinstance(schema, bool):
        return "" if schema else []
    said = assertions(schema) if isinstance(schema, dict) else None
    if said is None or depth > MAX_DEPTH:
        return None
    if "string" not in as_list(said.pop("type", "string")):
        return []
    if not said:
        return ""
    key, value = next(iter(said.items()))
    if {"minLength", "maxLength"} >= set(said):
        return rf"^(?s:.{{{said.get('minLength', 0)},{said.get('maxLength', '')}}})$"
    if len(said) > 1:
        return None
    if key == "$ref":
        return name_expression(follow(value), follow, depth + 1)
    if key in ("enum", "const"):
        return [name for name in ([value] if key == "const" else value) if isinstance(name, str)]
    if key == "pattern":
        return None if refusal({"type": "object", "patternProperties": {value: True}}) else str(value)
    if key == "not":
        names = name_expression(value, follow, depth + 1)
        if not isinstance(names, list) or max(map(len, names), default=0) > MAX_LENGTH:
            return None
        return f"^{other_strings(names)}$" if names else ""
    return _joined([name_expression(one, follow, depth + 1) for one in value]) if key == "anyOf" else None


def _joined(options: list[str | list[str] | None]) -> str | None:
    if any(option is None for option in options) or "" in options:
        return "" if "" in options else None
    return "|".join(
        f"(?:{option})" if isinstance(option, str) else f"(?:^(?:{'|'.join(map(escape, option))})$)"
        for option in options
        if option is not None
    )
