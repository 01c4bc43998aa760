"""Keywords of objects."""

from __future__ import annotations

from itertools import combinations, islice
from typing import Any

from penstock.sampling.schema_names import name_expression
from penstock.sampling.schema_not import Schema, any_of, assertions
from penstock.sampling.schema_strings import are_apart, refusal
from penstock.sampling.schema_writer import Part, Path, Write, Writer

MAX_SETS = 64  # of properties, one of which must be there
MAX_DEPTH = 8
DEPENDING = frozenset({"anyOf", "oneOf", "if", "dependentSchemas", "additionalProperties", "unevaluatedProperties"})
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"})


def write_properties(writer: Writer, work: Part, value: Schema, path: Path) -> None:
    work.written["properties"] = {name: writer.schema(one, (*path, name)) for name, one in value.items()}


def write_additional(writer: Writer, work: Part, value: Any, path: Path) -> None:
    work.written.setdefault("additionalProperties", writer.schema(value, path))


def write_patterns(writer: Writer, work: Part, value: Schema, path: Path) -> None:
    """llguidance takes expressions that it can read, no two of which match the same name."""
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
    may_ask = writer.apart.may_ask(len(names) ** 2 // 2)
    if not may_ask or not all(are_apart(one, two) for one, two in combinations(names, 2)):
        options = list(written.values())
        if any(option != options[0] for option in options):
            writer.relax("patternProperties", work.path, "two of them may match the same name")
            options = [any_of(options)]
        written = {"|".join(f"(?:{name})" for name in names): options[0]}
    if written:
        work.written["patternProperties"] = written


def write_names(writer: Writer, work: Part, value: Any, path: Path) -> None:
    """As properties of such names alone."""
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


def write_dependent_required(writer: Writer, work: Part, value: Schema, path: Path) -> None:
    for name, needed in value.items():
        _write_dependency(writer, work, name, {"required": needed}, path)


def write_dependent_schemas(writer: Writer, work: Part, value: Schema, path: Path) -> None:
    for name, needed in value.items():
        _write_dependency(writer, work, name, {"required": needed} if isinstance(needed, list) else needed, path)


def _write_dependency(writer: Writer, work: Part, name: str, needed: Any, path: Path) -> None:
    """Without the property, or with all that it needs."""
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


def write_least(writer: Writer, work: Part, value: int, path: Path) -> None:
    """Sets of properties, one of which must be there. llguidance itself counts where all that have a name are
    required."""
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
        sets = list(islice(combinations(names, min(missing, len(names) + 1)), MAX_SETS + 1))  # none of more than all
        options: list[Schema] = [{"required": list(one)} for one in sets]
        if missing == 1 and _has_free_names(work):
            options.append({"properties": dict.fromkeys(names, False), "minProperties": value})
        if not options or len(sets) > MAX_SETS or not work.may_branch(len(options)):
            writer.relax("minProperties", work.path, "there are too many cases")
        else:
            type = {"type": "object"} if work.is_object else {}
            work.require({"anyOf": [{**type, **option} for option in options]})


def _has_free_names(work: Part) -> bool:
    return work.said.get("additionalProperties", True) is not False or bool(work.said.get("patternProperties"))


def write_most(writer: Writer, work: Part, value: int, path: Path) -> None:
    """Sets of properties, one of which must be missing; beside them there are no others."""
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


def write_unevaluated(writer: Writer, work: Part, value: Any, path: Path) -> None:
    """The same as `additionalProperties` beside all properties that the schema speaks of, or one of its options."""
    if value is True or "additionalProperties" in work.said:
        return
    choice = next((key for key in ("anyOf", "oneOf") if key in work.said), "")
    options = work.said.get(choice, [True])
    around = _known(writer, {key: one for key, one in work.said.items() if key not in (choice, path[-1])})
    known = [_known(writer, option) for option in options]
    has_patterns = any(name.startswith("/") for one in (around, *known) for name in one or ())
    if around is None or None in known or has_patterns and "patternProperties" in writer.left_out:
        writer.relax("unevaluatedProperties", work.path)
    elif not COMBINING & set(work.said):
        work.written["additionalProperties"] = writer.schema(value, path)
    else:
        rest = writer.schema(value, path)
        closed = [_closed(work, {**around, **(one or {})}, rest) for one in known]
        work.require(any_of([{"allOf": [writer.merged(option, path), one]} for option, one in zip(options, closed)]))


def _closed(work: Part, known: dict[str, None], rest: Any) -> Schema:
    schema: Schema = {"type": "object"} if work.is_object else {}
    schema["properties"] = {name: True for name in known if not name.startswith("/")}
    patterns = {name[1:]: True for name in known if name.startswith("/")}
    return {**schema, **({"patternProperties": patterns} if patterns else {}), "additionalProperties": rest}


def _known(writer: Writer, said: Any, depth: int = 0) -> dict[str, None] | None:
    """Names of the properties that a schema always speaks of, expressions behind a slash; None where that depends on
    the instance."""
    if not isinstance(said, dict):
        return {}
    said = assertions(said)
    if depth > MAX_DEPTH or DEPENDING & set(said):
        return None
    found = dict.fromkeys(said.get("properties", ()))
    found |= {"/" + name: None for name in said.get("patternProperties", ())}
    below = [writer.follow(said["$ref"])] if isinstance(said.get("$ref"), str) else []
    for one in [*below, *said.get("allOf", ())]:
        more = _known(writer, one, depth + 1)
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
