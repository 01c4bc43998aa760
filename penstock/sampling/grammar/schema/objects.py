"""Rewrite the object keywords."""

from __future__ import annotations

from itertools import combinations, islice
from typing import Any

from penstock.sampling.grammar.schema.disjoint import are_strings_disjoint, refusal
from penstock.sampling.grammar.schema.negation import (
    MAX_LENGTH,
    Follow,
    Schema,
    any_of,
    as_list,
    assertions,
    escape,
    other_strings,
)
from penstock.sampling.grammar.schema.writer import Path, SchemaPart, Write, Writer

MAX_NAME_DEPTH = 4


def name_expression(schema: Any, follow: Follow, depth: int = 0) -> str | list[str] | None:
    """Return a regex or the list of names; "" if every name is allowed, None if it cannot be written."""
    if isinstance(schema, bool):
        return "" if schema else []
    said = assertions(schema) if isinstance(schema, dict) else None
    if said is None or depth > MAX_NAME_DEPTH:
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
    return _join_options([name_expression(one, follow, depth + 1) for one in value]) if key == "anyOf" else None


def _join_options(options: list[str | list[str] | None]) -> str | None:
    if any(option is None for option in options) or "" in options:
        return "" if "" in options else None
    return "|".join(
        f"(?:{option})" if isinstance(option, str) else f"(?:^(?:{'|'.join(map(escape, option))})$)"
        for option in options
        if option is not None
    )


MAX_SETS = 64  # of properties, one of which must be present
MAX_DEPTH = 8
DEPENDING = frozenset({"anyOf", "oneOf", "if", "dependentSchemas", "additionalProperties", "unevaluatedProperties"})
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"})


def write_properties(writer: Writer, work: SchemaPart, value: Schema, path: Path) -> None:
    work.written["properties"] = {name: writer.schema(one, (*path, name)) for name, one in value.items()}


def write_additional(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    work.written.setdefault("additionalProperties", writer.schema(value, path))


def write_patterns(writer: Writer, work: SchemaPart, value: Schema, path: Path) -> None:
    """Keep the regexes that llguidance reads and that overlap with no other."""
    written = {name: writer.schema(one, (*path, name)) for name, one in value.items()}
    unread = [
        name
        for name in value
        if "patternProperties" in writer.left_out or refusal({"type": "object", "patternProperties": {name: True}})
    ]
    for name in unread:
        writer.relax("patternProperties", work.path, f"{name} cannot be matched")
    if unread:
        rest = writer.schema(work.said.get("additionalProperties", True), path)
        work.written["additionalProperties"] = any_of([rest, *(written.pop(name) for name in unread)])
    names = list(written)
    may_compile = writer.apart.may_compile(len(names) ** 2 // 2)
    if not may_compile or not all(are_strings_disjoint(one, two) for one, two in combinations(names, 2)):
        options = list(written.values())
        if any(option != options[0] for option in options):
            writer.relax("patternProperties", work.path, "two of them may match the same name")
            options = [any_of(options)]
        written = {"|".join(f"(?:{name})" for name in names): options[0]}
    if written:
        work.written["patternProperties"] = written


def write_names(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    """Write `propertyNames` as properties of such names alone."""
    expression = name_expression(value, writer.follow)
    if expression == "":
        return
    is_alone = "patternProperties" not in work.said and "patternProperties" not in writer.left_out
    if expression is None or isinstance(expression, str) and not is_alone:
        writer.relax("propertyNames", work.path)
        return
    names: Schema = (
        {"patternProperties": {expression: True}}
        if isinstance(expression, str)
        else {"properties": dict.fromkeys(expression, True)}
    )
    names["additionalProperties"] = False
    work.require({"type": "object", **names} if work.is_object else names)


def write_dependent_required(writer: Writer, work: SchemaPart, value: Schema, path: Path) -> None:
    for name, needed in value.items():
        _write_dependency(writer, work, name, {"required": needed}, path)


def write_dependent_schemas(writer: Writer, work: SchemaPart, value: Schema, path: Path) -> None:
    for name, needed in value.items():
        _write_dependency(writer, work, name, {"required": needed} if isinstance(needed, list) else needed, path)


def _write_dependency(writer: Writer, work: SchemaPart, name: str, needed: Any, path: Path) -> None:
    """Write two options: without the property, or with all that it requires."""
    if needed is True or needed == {"required": []}:
        return
    if name in work.said.get("required", ()):
        work.require(writer.schema(needed, (*path, name)))
    elif work.may_branch(2):
        type = {"type": "object"} if work.is_object else {}
        work.require(
            {
                "anyOf": [
                    {**type, "properties": {name: False}},
                    {"allOf": [{**type, "required": [name]}, writer.schema(needed, (*path, name))]},
                ]
            }
        )
    else:
        writer.relax(str(path[-1]), work.path, "there are too many cases")


def write_least(writer: Writer, work: SchemaPart, value: int, path: Path) -> None:
    """Write `minProperties` as sets of properties, one of which must be present. llguidance counts by itself if all
    named properties are required."""
    required = work.said.get("required", ())
    names = [name for name in work.said.get("properties", {}) if name not in required]
    missing = value - len(set(required))
    if missing <= 0:
        return
    if "minProperties" in writer.left_out:
        writer.relax("minProperties", work.path)
        return
    if COMBINING & set(work.said) or not names and missing > 1 and _has_free_names(work):
        writer.relax("minProperties", work.path, "" if names else "a name may come twice")
    if COMBINING & set(work.said):
        return
    if not names:
        work.written["minProperties"] = value
    else:
        sets = list(
            islice(combinations(names, min(missing, len(names) + 1)), MAX_SETS + 1)
        )  # if there are fewer names, require all
        options: list[Schema] = [{"required": list(one)} for one in sets]
        if missing == 1 and _has_free_names(work):
            options.append({"properties": dict.fromkeys(names, False), "minProperties": value})
        if not options or len(sets) > MAX_SETS or not work.may_branch(len(options)):
            writer.relax("minProperties", work.path, "there are too many cases")
        else:
            type = {"type": "object"} if work.is_object else {}
            work.require({"anyOf": [{**type, **option} for option in options]})


def _has_free_names(work: SchemaPart) -> bool:
    return work.said.get("additionalProperties", True) is not False or bool(work.said.get("patternProperties"))


def write_most(writer: Writer, work: SchemaPart, value: int, path: Path) -> None:
    """Write `maxProperties` as sets of properties, one of which must be absent; no others are allowed."""
    required = work.said.get("required", ())
    names = [name for name in work.said.get("properties", {}) if name not in required]
    spare = value - len(set(required))
    if "minProperties" in writer.left_out:
        writer.relax("maxProperties", work.path)
        return
    if not names and not COMBINING & set(work.said):
        work.written["maxProperties"] = value
        return
    if COMBINING & set(work.said):
        writer.relax("maxProperties", work.path)
        return
    sets = list(islice(combinations(names, max(0, len(names) - spare)), MAX_SETS + 1))
    if spare < 0:
        work.require(False)
        return
    if len(sets) > MAX_SETS or not work.may_branch(len(sets)):
        writer.relax("maxProperties", work.path, "there are too many cases")
        return
    known = {name: True for name in (*names, *required)}
    type = {"type": "object"} if work.is_object else {}
    work.require(
        {
            "anyOf": [
                {**type, "properties": {**known, **dict.fromkeys(one, False)}, "additionalProperties": False}
                for one in sets
            ]
        }
    )


def write_unevaluated(writer: Writer, work: SchemaPart, value: Any, path: Path) -> None:
    """Write `unevaluatedProperties` as `additionalProperties` next to all properties the schema or its options name."""
    if value is True or "additionalProperties" in work.said:
        return
    choice = next((key for key in ("anyOf", "oneOf") if key in work.said), "")
    options = work.said.get(choice, [True])
    around = _list_names(writer, {key: one for key, one in work.said.items() if key not in (choice, path[-1])})
    known = [_list_names(writer, option) for option in options]
    has_patterns = any(name.startswith("/") for one in (around, *known) for name in one or ())
    if around is None or None in known or has_patterns and "patternProperties" in writer.left_out:
        writer.relax("unevaluatedProperties", work.path)
    elif not COMBINING & set(work.said):
        work.written["additionalProperties"] = writer.schema(value, path)
    else:
        rest = writer.schema(value, path)
        closed = [_close_object(work, {**around, **(one or {})}, rest) for one in known]
        work.require(
            any_of([{"allOf": [writer.write_for_merge(option, path), one]} for option, one in zip(options, closed)])
        )


def _close_object(work: SchemaPart, known: dict[str, None], rest: Any) -> Schema:
    schema: Schema = {"type": "object"} if work.is_object else {}
    schema["properties"] = {name: True for name in known if not name.startswith("/")}
    patterns = {name[1:]: True for name in known if name.startswith("/")}
    return {**schema, **({"patternProperties": patterns} if patterns else {}), "additionalProperties": rest}


def _list_names(writer: Writer, said: Any, depth: int = 0) -> dict[str, None] | None:
    """Return the property names a schema always covers, regexes after a slash; None if that depends on the instance."""
    if not isinstance(said, dict):
        return {}
    said = assertions(said)
    if depth > MAX_DEPTH or DEPENDING & set(said):
        return None
    found = dict.fromkeys(said.get("properties", ()))
    found |= {"/" + name: None for name in said.get("patternProperties", ())}
    below = [writer.follow(said["$ref"])] if isinstance(said.get("$ref"), str) else []
    for one in [*below, *said.get("allOf", ())]:
        more = _list_names(writer, one, depth + 1)
        if more is None:
            return None
        found |= more
    return found


KEYWORDS: dict[str, Write] = {
    "properties": write_properties,
    "additionalProperties": write_additional,
    "patternProperties": write_patterns,
    "propertyNames": write_names,
    "dependentRequired": write_dependent_required,
    "dependentSchemas": write_dependent_schemas,
    "dependencies": write_dependent_schemas,
    "minProperties": write_least,
    "maxProperties": write_most,
    "unevaluatedProperties": write_unevaluated,
}
