"""Rewrite JSON schemas in the keywords that llguidance supports.

An unsupported keyword is expressed by others if possible; answers then match the given schema. Otherwise it is relaxed:
the result matches all that the given schema does, and more. Each relaxed keyword is reported with its path; a strict
request is refused instead.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import permutations
from typing import Any

from penstock.errors import InvalidRequest
from penstock.sampling.grammar.schema import objects
from penstock.sampling.grammar.schema.disjoint import refusal
from penstock.sampling.grammar.schema.negation import Schema, assertions, negate
from penstock.sampling.grammar.schema.writer import Path, SchemaPart, Write, Writer

MAX_LENGTH = 4096  # each required character is a state in llguidance
LENGTHS = ("minLength", "maxLength")


def write_pattern(writer: Writer, work: SchemaPart, value: str, path: Path) -> None:
    """Combine with the other string keywords as far as llguidance compiles them together."""
    kept: dict[str, Any] = {}
    for keys in (("pattern",), ("format",), LENGTHS):
        more = {key: work.said[key] for key in keys if key in work.said}
        why = refusal({"type": "string", **kept, **more}) if more else None
        if why is None:
            kept |= more
        else:
            for key in more:
                writer.relax(key, work.path, why)
    work.written |= kept


def write_length(writer: Writer, work: SchemaPart, value: int, path: Path) -> None:
    if "pattern" in work.said:
        return
    if value > MAX_LENGTH and path[-1] == "minLength":
        writer.relax("minLength", work.path, f"it is over {MAX_LENGTH}")
        return
    work.written[str(path[-1])] = value


def write_format(writer: Writer, work: SchemaPart, value: str, path: Path) -> None:
    """Write a known format; unknown ones are annotations and were dropped."""
    if "pattern" not in work.said:
        work.written["format"] = value


MAX_OPTIONS = 64  # of a oneOf or of cases, compared pairwise
MAX_NEGATED = 256  # overlapping pairs of a oneOf to negate


def write_reference(writer: Writer, work: SchemaPart, value: str, path: Path) -> None:
    if len(work.said) > 1:
        _add(work, "allOf", [writer.write_for_merge({"$ref": value}, work.path)])
        return
    found = writer.reference(value)
    work.written |= found if isinstance(found, dict) else {}
    work.require(found is not False)


def write_all_of(writer: Writer, work: SchemaPart, value: list[Any], path: Path) -> None:
    cases = _cases(writer, work, value)
    for place, one in enumerate(value):
        if not any(one is case for case in cases):
            _add(work, "allOf", [writer.write_for_merge(one, (*path, place), work.max_branches // work.num_branches)])
            work.num_branches *= writer.num_branches
    if cases:
        _write_cases(writer, work, cases, path)


def _add(work: SchemaPart, key: str, schemas: list[Any]) -> None:
    work.written[key] = [*work.written.get(key, ()), *schemas]


def write_any_of(writer: Writer, work: SchemaPart, value: list[Any], path: Path) -> None:
    write = writer.write_for_merge if len(work.said) > 1 else writer.schema
    options = [write(one, (*path, place)) for place, one in enumerate(value)]
    work.num_branches *= max(1, len(options))
    _add_options(work, options)


def _add_options(work: SchemaPart, options: list[Any]) -> None:
    """Write in place if possible: the order of keywords is the order of properties."""
    if "anyOf" in work.written or not options:
        work.require({"anyOf": options} if options else False)
    else:
        work.written["anyOf"] = options


def write_one_of(writer: Writer, work: SchemaPart, value: list[Any], path: Path) -> None:
    """Where two options overlap, write each without the other."""
    work.num_branches *= max(1, len(value))
    without = _without_each_other(writer, value)
    if without is None:
        writer.relax("oneOf", work.path, "more than one of its options may match")
        without = [[] for _ in value]
    options = []
    for place, (one, others) in enumerate(zip(value, without)):
        write = writer.write_for_merge if others or len(work.said) > 1 else writer.schema
        option = write(one, (*path, place))
        options.append({"allOf": [option, *(writer.schema(other, path) for other in others)]} if others else option)
    _add_options(work, options)


def _without_each_other(writer: Writer, options: list[Any]) -> list[list[Any]] | None:
    """For each option, return schemas that exclude the options it may overlap with."""
    without: list[list[Any]] = [[] for _ in options]
    if writer.apart.have_discriminator(options):
        return without
    if len(options) > MAX_OPTIONS:
        return None
    for place, one in enumerate(options):
        for other, two in enumerate(options[place + 1 :], place + 1):
            if not writer.apart.disjoint(one, two):
                without[place].append(negate(two, writer.follow))
                without[other].append(negate(one, writer.follow))
    negated = [one for each in without for one in each]
    return None if len(negated) > MAX_NEGATED or any(one is None for one in negated) else without


def write_not(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    negated = negate(value, writer.follow)
    if negated is None or not work.may_branch(len(negated.get("anyOf", ())) if isinstance(negated, dict) else 1):
        writer.relax("not", work.path)
    else:
        work.require(writer.schema(negated, path))


def write_if(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    """Write both cases, each with the condition that separates them."""
    then, otherwise = work.said.get("then", True), work.said.get("else", True)
    if then is True and otherwise is True:
        return
    negated = True if then is True else negate(value, writer.follow)
    if negated is None:
        writer.relax("if", work.path, "the condition cannot be negated")
        negated = True
    if negated is True and otherwise is True and then is not True:
        return
    if not work.may_branch(2):
        writer.relax("if", work.path, "there are too many cases")
        return
    met = [writer.schema(value, path), writer.schema(then, (*work.path, "then"))]
    unmet = [writer.schema(negated, path), writer.schema(otherwise, (*work.path, "else"))]
    work.require({"anyOf": [{"allOf": met}, {"allOf": unmet}]})


def _cases(writer: Writer, work: SchemaPart, parts: list[Any]) -> list[Schema]:
    """Return the if/then parts of an allOf, if their conditions are pairwise disjoint."""
    cases = [part for part in parts if isinstance(part, dict) and set(assertions(part)) == {"if", "then"}]
    if not 1 < len(cases) <= MAX_OPTIONS:
        return []
    met = [_condition(work, case) for case in cases]
    apart = all(writer.apart.disjoint(one, two) for place, one in enumerate(met) for two in met[place + 1 :])
    return cases if apart and all(negate(case["if"], writer.follow) is not None for case in cases) else []


def _condition(work: SchemaPart, case: Schema) -> Any:
    """Return the condition with all that the surrounding schema requires."""
    around = {key: work.said[key] for key in ("type", "required") if key in work.said}
    return {"allOf": [around, case["if"]]}


def _write_cases(writer: Writer, work: SchemaPart, cases: list[Schema], path: Path) -> None:
    """Write one branch for each condition, and one for none of them."""
    options = [
        {"allOf": [writer.schema(_condition(work, case), path), writer.schema(case["then"], path)]} for case in cases
    ]
    none = [writer.schema(negate(case["if"], writer.follow), path) for case in cases]
    work.num_branches *= len(options) + 1
    work.require({"anyOf": [*options, {"allOf": none}]})


def leave(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    """Do nothing: another keyword handles this one."""


MAX_DISTINCT = 4  # values; all 65 orders of 4 are written out
MAX_CONTAINS = 64


def write_items(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    work.written["items"] = writer.schema(value, path)


def write_prefix(writer: Writer, work: SchemaPart, value: list[Any], path: Path) -> None:
    work.written["prefixItems"] = [writer.schema(one, (*path, place)) for place, one in enumerate(value)]


def write_unevaluated(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    """Write `unevaluatedItems` as `items` if no other keyword covers items."""
    if value is True or "items" in work.said:
        return
    if {"$ref", "allOf", "anyOf", "oneOf", "if", "contains", "not"} & set(work.said):
        writer.relax("unevaluatedItems", work.path)
    else:
        work.written["items"] = writer.schema(value, path)


def write_unique(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    if value is not True or work.said.get("maxItems", 2) <= 1:
        return
    values = _distinct(writer, work.said.get("items"))
    if values is None or {"prefixItems", "contains"} & set(work.said) or not work.may_branch(len(values) + 1):
        writer.relax("uniqueItems", work.path)
        return
    least, most = work.said.get("minItems", 0), work.said.get("maxItems", len(values))
    orders = [list(order) for size in range(least, min(most, len(values)) + 1) for order in permutations(values, size)]
    work.require({"anyOf": [{"type": "array", "const": order} for order in orders] + _no_array(work)})


def _no_array(work: SchemaPart) -> list[Schema]:
    if work.said.get("type") in ("array", ["array"]):
        return []
    return [{"type": ["null", "boolean", "number", "string", "object"]}]


def _distinct(writer: Writer, items: Any) -> list[Any] | None:
    """Return the values an item can have, if they are few."""
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


def write_contains(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    """Require the matching items to come first."""
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


def _when_array(work: SchemaPart, schema: Schema) -> Schema:
    return {"type": "array", **schema} if work.said.get("type") in ("array", ["array"]) else schema


MAX_RELAXED = 32  # reported; the rest are counted
MAX_WRITTEN = 1 << 22  # characters
KEYWORDS: dict[str, Write] = {
    "$ref": write_reference,
    "allOf": write_all_of,
    "anyOf": write_any_of,
    "oneOf": write_one_of,
    "not": write_not,
    "if": write_if,
    "then": leave,
    "else": leave,
    "pattern": write_pattern,
    "minLength": write_length,
    "maxLength": write_length,
    "format": write_format,
    "items": write_items,
    "prefixItems": write_prefix,
    "unevaluatedItems": write_unevaluated,
    "uniqueItems": write_unique,
    "contains": write_contains,
    "minContains": leave,
    "maxContains": leave,
    **objects.KEYWORDS,
}


def write_schema(text: str, strict: bool, left_out: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    """Return the schema for llguidance, and its relaxed keywords. `left_out` relaxes `minProperties` (and
    `maxProperties`) or `patternProperties` (and `propertyNames`) everywhere."""
    writer = Writer(json.loads(text), strict, KEYWORDS, frozenset(left_out))
    written = json.dumps(writer.write())
    if len(written) > MAX_WRITTEN:
        raise InvalidRequest(
            f"structured_outputs: the schema is too large: written out it has {len(written)} "
            f"characters, and {MAX_WRITTEN} are compiled; give a simpler one"
        )
    relaxed = tuple(writer.relaxed)
    if len(relaxed) > MAX_RELAXED:
        relaxed = (*relaxed[: MAX_RELAXED - 1], f"and {len(relaxed) - MAX_RELAXED + 1} more")
    return written, relaxed
