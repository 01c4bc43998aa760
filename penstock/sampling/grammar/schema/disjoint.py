"""Decide if two schemas are disjoint (no instance matches both), as far as that can be proven."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from penstock.sampling.grammar.matcher import reason
from penstock.sampling.grammar.schema.negation import Follow, Schema, as_list, assertions, is_number, json_key, same

MAX_KEPT = 2048
MAX_KEPT_CHARS = 2048  # characters of one


def _refusal(schema: str) -> str:
    return _kept(schema) if len(schema) <= MAX_KEPT_CHARS else _ask(schema)


def _ask(schema: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema, None, {"whitespace_flexible": False}))


_kept = lru_cache(MAX_KEPT)(_ask)


def refusal(schema: dict[str, Any]) -> str | None:
    """Return llguidance's reason not to compile a small schema; None if it compiles or nothing matches it."""
    said = _refusal(json.dumps(schema))
    return reason(said) if said and "nsatisfiable" not in said else None


def is_empty(schema: dict[str, Any]) -> bool:
    """True if nothing matches a small schema."""
    return "nsatisfiable" in _refusal(json.dumps(schema))


def are_strings_disjoint(first: str, two: str) -> bool:
    """True if no string matches both regexes."""
    if first == two:
        return False
    return not _refusal(json.dumps({"type": "object", "patternProperties": {first: True, two: True}}))


EVERY_TYPE = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
APART_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "ipv4", "ipv6", "uuid"})
STRING = frozenset({"minLength", "maxLength", "pattern", "format"})
MAX_DEPTH = 6
MAX_STEPS = 20_000  # per schema
MAX_COMPILED = 5000  # llguidance compilations per schema
MAX_CONJUNCTS = 16


class Disjointness:
    """Disjointness of schemas; True is a proof, False is not."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._num_steps = self._num_compiled = 0

    def may_compile(self, num: int = 1) -> bool:
        """Count `num` llguidance compilations; False once there are too many."""
        self._num_compiled += num
        return self._num_compiled <= MAX_COMPILED

    def have_discriminator(self, options: list[Any]) -> bool:
        """True if a required property, or the value itself, discriminates between the options."""
        named = [self._values_by_name(option) for option in options]
        for name in named[0] if named else ():
            values = [key for one in named for key in one.get(name, [])]
            if all(name in one for one in named) and len(set(values)) == len(values):
                return True
        return False

    def _values_by_name(self, option: Any) -> dict[str, list[str]]:
        """Return the values an option allows for each required property; "" stands for the option itself."""
        parts = self._conjuncts(option)
        within = {"": parts}
        if self._types(parts) == {"object"}:
            names = dict.fromkeys(name for part in parts for name in part.get("required", ()))
            for name in list(names)[:MAX_CONJUNCTS]:
                within[name] = [part for one in _properties(parts, name) for part in self._conjuncts(one)]
        found: dict[str, list[str]] = {}
        for name, each in within.items():
            values = next((values for part in each if (values := _values(part)) is not None), None)
            if values is not None:
                found[name] = list(dict.fromkeys(map(json_key, values)))
        return found

    def disjoint(self, first: Any, two: Any, depth: int = 0) -> bool:
        self._num_steps += 1
        if first is False or two is False:
            return True
        if depth > MAX_DEPTH or self._num_steps > MAX_STEPS:
            return False
        ones, twos = self._conjuncts(first), self._conjuncts(two)
        for side, other in ((ones, two), (twos, first)):
            for part in side:
                for key in ("anyOf", "oneOf"):
                    options = as_list(part[key]) if key in part else []
                    if options and all(self.disjoint(option, other, depth + 1) for option in options):
                        return True
                values = _values(part)
                if values is not None and all(self._fails(value, other, depth + 1) for value in values):
                    return True
        shared = self._types(ones) & self._types(twos)
        return all(self._apart(type, ones, twos, depth) for type in shared)

    def _conjuncts(self, schema: Any, depth: int = 0) -> list[Schema]:
        """Return the flat schemas that an instance must match all of."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return []
        said = assertions(schema)
        found = [said]
        below = [self._follow(said["$ref"])] if isinstance(said.get("$ref"), str) else []
        for part in [*below, *(as_list(said["allOf"]) if "allOf" in said else ())]:
            found += self._conjuncts(part, depth + 1)
        return found[:MAX_CONJUNCTS]

    def _types(self, parts: list[Schema]) -> frozenset[str]:
        found = EVERY_TYPE
        for part in parts:
            if "type" in part:
                named = {type for type in as_list(part["type"]) if isinstance(type, str)}
                found &= named | ({"integer"} if "number" in named else set())
            values = _values(part)
            if values is not None:
                found &= {_type(value) for value in values}
        return found

    def _apart(self, type: str, ones: list[Schema], twos: list[Schema], depth: int) -> bool:
        if type == "object":
            return self._objects_apart(ones, twos, depth) or _ranges_apart(ones, twos, "minProperties", "maxProperties")
        if type == "array":
            return _ranges_apart(ones, twos, "minItems", "maxItems")
        if type == "string":
            return _ranges_apart(ones, twos, "minLength", "maxLength") or self._strings_apart(ones, twos)
        return type in ("integer", "number") and _ranges_apart(ones, twos, "minimum", "maximum")

    def _objects_apart(self, ones: list[Schema], twos: list[Schema], depth: int) -> bool:
        names = {name: None for part in [*ones, *twos] for name in part.get("required", ()) if isinstance(name, str)}
        return any(
            self.disjoint(one, two, depth + 1)
            for name in names
            for one in _properties(ones, name)
            for two in _properties(twos, name)
        )

    def _strings_apart(self, ones: list[Schema], twos: list[Schema]) -> bool:
        for one in ones:
            for two in twos:
                formats = {one.get("format"), two.get("format")}
                if len(formats) == 2 and formats <= APART_FORMATS:
                    return True
                if (
                    "pattern" in one
                    and "pattern" in two
                    and self.may_compile()
                    and are_strings_disjoint(one["pattern"], two["pattern"])
                ):
                    return True
        return False

    def _fails(self, value: Any, schema: Any, depth: int) -> bool:
        """True if `value` provably does not match."""
        if schema is False:
            return True
        if depth > MAX_DEPTH:
            return False
        parts = self._conjuncts(schema)
        if _type(value) not in self._types(parts):
            return True
        for part in parts:
            values = _values(part)
            if values is not None and not any(same(value, one) for one in values):
                return True
            if isinstance(value, dict) and any(name not in value for name in part.get("required", ())):
                return True
            if isinstance(value, dict) and any(
                self._fails(item, one, depth + 1) for name, item in value.items() for one in _properties([part], name)
            ):
                return True
            if is_number(value) and (value < part.get("minimum", value) or value > part.get("maximum", value)):
                return True
            if (
                isinstance(value, str)
                and STRING & set(part)
                and self.may_compile()
                and is_empty({"type": "string", "const": value, **{key: part[key] for key in STRING if key in part}})
            ):
                return True
        return False


def _values(part: Schema) -> list[Any] | None:
    return [part["const"]] if "const" in part else part["enum"] if isinstance(part.get("enum"), list) else None


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "integer" if value == value // 1 else "number"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _properties(parts: list[Schema], name: str) -> list[Any]:
    """Return the schemas that the property `name` must match."""
    found: list[Any] = []
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(properties[name])
        elif "patternProperties" not in part and "additionalProperties" in part:
            found.append(part["additionalProperties"])
    return found or [True]


def _ranges_apart(ones: list[Schema], twos: list[Schema], min_key: str, max_key: str) -> bool:
    return any(_over(one, min_key, two, max_key) or _over(two, min_key, one, max_key) for one in ones for two in twos)


def _over(low: Schema, min_key: str, high: Schema, max_key: str) -> bool:
    """True if every value of `low` is above every value of `high`."""
    for name, is_open in ((min_key, False), ("exclusiveMinimum", True)):
        for other, other_open in ((max_key, False), ("exclusiveMaximum", True)):
            begin, end = low.get(name), high.get(other)
            if name != min_key and min_key != "minimum" or other != max_key and max_key != "maximum":
                continue
            if is_number(begin) and is_number(end) and (begin > end or begin == end and (is_open or other_open)):
                return True
    return False
