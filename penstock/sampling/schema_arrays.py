"""Keywords of arrays."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from penstock.sampling.schema_logic import leave
from penstock.sampling.schema_not import Schema, assertions, negate
from penstock.sampling.schema_writer import Part, Path, Write, Writer

MAX_DISTINCT = 4  # values, whose orders are written out: 65 of them
MAX_CONTAINS = 64


def write_items(writer: Writer, work: Part, value: Any, path: Path) -> None:
    work.written["items"] = writer.schema(value, path)


def write_prefix(writer: Writer, work: Part, value: list[Any], path: Path) -> None:
    work.written["prefixItems"] = [writer.schema(one, (*path, place)) for place, one in enumerate(value)]


def write_unevaluated(writer: Writer, work: Part, value: Any, path: Path) -> None:
    """The same as `items` where no other keyword speaks of items."""
    if value is True or "items" in work.said:
        return
    if {"$ref", "allOf", "anyOf", "oneOf", "if", "contains", "not"} & set(work.said):
        writer.relax("unevaluatedItems", work.path)
    else:
        work.written["items"] = writer.schema(value, path)


def write_unique(writer: Writer, work: Part, value: Any, path: Path) -> None:
    if value is not True or work.said.get("maxItems", 2) <= 1:
        return
    values = _distinct(writer, work.said.get("items"))
    if values is None or {"prefixItems", "contains"} & set(work.said) or not work.may_branch(len(values) + 1):
        writer.relax("uniqueItems", work.path)
        return
    least, most = work.said.get("minItems", 0), work.said.get("maxItems", len(values))
    orders = [list(order) for size in range(least, min(most, len(values)) + 1) for order in permutations(values, size)]
    work.require({"anyOf": [{"type": "array", "const": order} for order in orders] + _no_array(work)})


def _no_array(work: Part) -> list[Schema]:
    if work.said.get("type") in ("array", ["array"]):
        return []
    return [{"type": ["null", "boolean", "number", "string", "object"]}]


def _distinct(writer: Writer, items: Any) -> list[Any] | None:
    """The values that an item can have, where they are few."""
    said = assertions(items) if isinstance(items, dict) else {}
    if set(said) == {"$ref"}:
        found = writer.follow(said["$ref"])
        said = assertions(found) if isinstance(found, dict) else {}
    values: Any = said.get("enum")
    if "const" in said:
        values = [said["const"]]
    elif values is None and said.get("type") == "boolean":
        values = [True, False]
    is_few = values is not None and len(values) <= MAX_DISTINCT and set(said) <= {"enum", "const", "type"}
    return values if is_few else None


def write_contains(writer: Writer, work: Part, value: Any, path: Path) -> None:
    """The first items are those that are asked for."""
    least, most = work.said.get("minContains", 1), work.said.get("maxContains")
    items = work.said.get("items", True)
    if "prefixItems" in work.said or least > MAX_CONTAINS:
        writer.relax("contains", work.path)
        return
    wanted = writer.schema({"allOf": [items, value]}, path)
    if least:
        work.require(_when_array(work, {"prefixItems": [wanted] * least, "minItems": least}))
    if most is None:
        return
    others = negate(value, writer.follow)
    if others is None or most < least:
        writer.relax("maxContains", work.path)
    else:
        work.require(
            _when_array(
                work, {"prefixItems": [writer.schema(items, path)] * most, "items": writer.schema(others, path)}
            )
        )


def _when_array(work: Part, schema: Schema) -> Schema:
    return {"type": "array", **schema} if work.said.get("type") in ("array", ["array"]) else schema


KEYWORDS: dict[str, Write] = {
    "items": write_items,
    "prefixItems": write_prefix,
    "unevaluatedItems": write_unevaluated,
    "uniqueItems": write_unique,
    "contains": write_contains,
    "minContains": leave,
    "maxContains": leave,
}
