"""The types that a schema leaves out: `properties` without a `type` means an object to all who write it, though by the
standard it lets numbers and texts through. An answer of the type that is meant matches the schema as well."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

_FAMILIES = {
    "object": (
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "string": ("pattern", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_NAMED = frozenset({"type", "const", "enum"})
_ELSEWHERE = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if"})
# These ask for what does not match a part; of a part with a type that would be more.
_NEGATING = re.compile(r'"(?:not|if|oneOf|contains|dependentSchemas|dependencies|unevaluated\w+)"\s*:')
_REFERRING = re.compile(r'"\$\w*[rR]ef"\s*:')
_MAPS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_PARTS = ("additionalProperties", "items", "additionalItems")
_LISTS = ("items", "prefixItems", "anyOf")


def add_types(text: str) -> str:
    """The schema, its parts with the types that their keywords speak of."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        return text
    negates = bool(_NEGATING.search(text))
    if negates and _REFERRING.search(text):  # what a part is referred to for is not known
        _add_type(schema, _FAMILIES)
    else:
        _walk(schema, [] if negates else list(_DEFINITIONS))
    return json.dumps(schema)


def _walk(schema: Any, more: list[str], is_merged: bool = False) -> None:
    """`is_merged`: with others, which may speak of values of other types."""
    if not isinstance(schema, dict):
        return
    _add_type(schema, ("object",) if is_merged else _FAMILIES)
    parts = [schema.get(key) for key in _PARTS]
    for key in (*_MAPS, *more):
        named = schema.get(key)
        parts += named.values() if isinstance(named, dict) else ()
    for key in _LISTS:
        parts += _listed(schema, key)
    for part in parts:
        _walk(part, more)
    for part in _listed(schema, "allOf"):
        _walk(part, more, is_merged=True)


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    listed = schema.get(key)
    return listed if isinstance(listed, list) else []


def _add_type(schema: dict[str, Any], kinds: Iterable[str]) -> None:
    if _NAMED & schema.keys():
        return
    spoken_of = [kind for kind, keywords in _FAMILIES.items() if any(_has(schema, key) for key in keywords)]
    if (
        len(spoken_of) == 1
        and spoken_of[0] in kinds
        and (spoken_of[0] in ("object", "array") or not _ELSEWHERE & schema.keys())
    ):
        schema["type"] = spoken_of[0]


def _has(schema: dict[str, Any], key: str) -> bool:
    return key in schema and not (key == "required" and isinstance(schema[key], bool))  # draft 03's
