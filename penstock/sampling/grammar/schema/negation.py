"""Negate a schema, if its negation can be written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeGuard

from penstock.errors import InvalidRequest, quote

Schema = dict[str, Any]
TYPES = ("null", "boolean", "number", "string", "array", "object")
# All other keywords constrain nothing.
ASSERTIONS = frozenset(
    {
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "const",
        "enum",
        "type",
        "items",
        "additionalItems",
        "prefixItems",
        "unevaluatedItems",
        "contains",
        "minContains",
        "maxContains",
        "minItems",
        "maxItems",
        "uniqueItems",
        "properties",
        "patternProperties",
        "additionalProperties",
        "unevaluatedProperties",
        "propertyNames",
        "required",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "minProperties",
        "maxProperties",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    }
)
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_LISTS, _MAPS = (
    ("allOf", "anyOf", "oneOf", "enum", "prefixItems"),
    ("properties", "patternProperties", "dependencies", "dependentRequired", "dependentSchemas"),
)
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_DEPTH = 8
MAX_COUNT = 1 << 62  # a larger one constrains nothing
MAX_VALUES = 256
MAX_CHARS = 4096  # total over the strings that one regex excludes
MAX_LENGTH = 200  # of one string: each character is a nested group
Follow = Callable[[str], Any]


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def assertions(schema: Schema) -> Schema:
    """Return the keywords that constrain an instance, in terms of draft 2020-12."""
    said = {
        key: value
        for key, value in schema.items()
        if key in ASSERTIONS and (key != "format" or not isinstance(value, str) or value in FORMATS)
    }
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(said.get(exclusive), bool):
            is_exclusive = said.pop(exclusive)
            if is_exclusive and bound in said:
                said[exclusive] = said.pop(bound)
    if isinstance(said.get("items"), list):
        said["prefixItems"] = said.pop("items")
        if "additionalItems" in said:
            said["items"] = said.pop("additionalItems")
    said.pop("additionalItems", None)
    if isinstance(said.get("required"), bool):  # in draft 03 it belongs to the property
        del said["required"]
    for key, value in said.items():
        if not _is_shaped(key, value):
            raise InvalidRequest(f"structured_outputs: {key}: {quote(value)} in the schema is not valid; correct it")
        if key in _COUNTS:
            said[key] = min(int(value), MAX_COUNT)
    return said


def _is_shaped(key: str, value: Any) -> bool:
    if key in _LISTS:
        return isinstance(value, list)
    if key in _MAPS:
        return isinstance(value, dict)
    if key in _NUMBERS:
        return is_number(value)
    if key in _COUNTS:
        return is_number(value) and 0 <= value < math.inf and value == int(value)
    if key == "type" and isinstance(value, list) or key == "required":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if key in ("type", "pattern", "format", "$ref"):
        return isinstance(value, str)
    return key in ("const", "uniqueItems", "$ref") or isinstance(value, (dict, bool))


def negate(schema: Any, follow: Follow, depth: int = 0) -> Any | None:
    """Return a schema that matches nothing that `schema` matches; None if there is none. It may exclude more, never
    less."""
    if isinstance(schema, bool):
        return not schema
    if depth > MAX_DEPTH or not isinstance(schema, dict):
        return None
    options: list[Any] = []
    for key, value in assertions(schema).items():
        more = _negate_keyword(key, value, follow, depth + 1)
        if more is None:
            return None
        options += [option for option in more if option is not False]
    return any_of(options)


def any_of(options: list[Any]) -> Any:
    return {"anyOf": options} if len(options) > 1 else options[0] if options else False


def _negate_keyword(key: str, value: Any, follow: Follow, depth: int) -> list[Any] | None:
    bounds = {
        "minimum": "exclusiveMaximum",
        "maximum": "exclusiveMinimum",
        "exclusiveMinimum": "maximum",
        "exclusiveMaximum": "minimum",
    }
    counts = {
        "minLength": ("string", "maxLength", -1),
        "maxLength": ("string", "minLength", 1),
        "minItems": ("array", "maxItems", -1),
        "maxItems": ("array", "minItems", 1),
        "minProperties": ("object", "maxProperties", -1),
        "maxProperties": ("object", "minProperties", 1),
    }
    if key in bounds:
        return [{"type": "number", bounds[key]: value}]
    if key in counts:
        type, other, by = counts[key]
        return [{"type": type, other: value + by}] if isinstance(value, int) and value + by >= 0 else []
    if key == "type":
        rest = [type for type in TYPES if type not in as_list(value)]
        return [{"type": [type for type in rest if type != "number" or "integer" not in as_list(value)]}]
    if key in ("const", "enum"):
        return _other_values([value] if key == "const" else as_list(value))
    if key == "required":
        return [{"type": "object", "properties": {name: False}} for name in value]
    if key == "not":
        return [value]
    several = {
        "allOf": lambda options: options,
        "anyOf": lambda options: [{"allOf": options}],
        "properties": None,
        "$ref": None,
    }
    if key not in several:
        return None
    if key == "$ref":
        options = [negate(follow(value), follow, depth)]
    elif key == "properties":
        options = [_without(name, negate(one, follow, depth)) for name, one in value.items()]
    else:
        options = [negate(one, follow, depth) for one in as_list(value)]
    if any(option is None for option in options):
        return None
    combine = several[key]
    return combine(options) if combine else options


def _without(name: str, schema: Any) -> Any:
    if schema is None or schema is False:
        return schema
    return {"type": "object", "properties": {name: schema}, "required": [name]}


def _other_values(values: list[Any]) -> list[Any] | None:
    """Return schemas for every value but these."""
    strings = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if is_number(value)})
    bools = {value for value in values if isinstance(value, bool)}
    if any(isinstance(value, (list, dict)) for value in values) or len(values) > MAX_VALUES:
        return None
    if sum(map(len, strings)) > MAX_CHARS or max(map(len, strings), default=0) > MAX_LENGTH:
        return None
    taken = {"null": None in values, "boolean": bools, "number": numbers, "string": strings}
    options: list[Any] = [{"type": [type for type in TYPES if not taken.get(type)]}]
    if strings:
        options.append({"type": "string", "pattern": f"^{other_strings(strings)}$"})
    if len(bools) == 1:
        options.append({"const": True not in bools})
    bounds: list[Any] = [None, *numbers, None]
    for low, high in zip(bounds, bounds[1:]) if numbers else ():
        option: Schema = {"type": "number"}
        option |= {} if low is None else {"exclusiveMinimum": low}
        option |= {} if high is None else {"exclusiveMaximum": high}
        options.append(option)
    return options


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def other_strings(strings: list[str]) -> str:
    """Return a regex for all strings but these: one branch for each position where a string diverges."""
    tree: dict[str, Any] = {}
    for text in strings:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = True
    return _write_branches(tree)


def _write_branches(tree: dict[str, Any]) -> str:
    chars = [char for char in tree if char]
    any_text = r"(?s:.*)"
    if not chars:
        return r"(?s:.+)"
    branches = [
        f"[^{''.join(map(escape, chars))}]{any_text}",
        *(escape(char) + _write_branches(tree[char]) for char in chars),
    ]
    return "(?:" + "|".join(branches) + ")" + ("" if "" in tree else "?")


def escape(text: str) -> str:
    """Escape a text for use as a regex, alone or in a character class."""
    return "".join(f"\\x{ord(char):02x}" if ord(char) < 128 and not char.isalnum() else char for char in text)


def same(first: Any, two: Any) -> bool:
    """True if equal as JSON: 1 is 1.0, and true is not 1."""
    return json_key(first) == json_key(two)


def json_key(value: Any) -> str:
    """Return a key that is equal for values equal as JSON."""
    if isinstance(value, float) and value == value and abs(value) < 2**63 and value == int(value):
        return json.dumps(int(value))
    return json.dumps(value, sort_keys=True)
