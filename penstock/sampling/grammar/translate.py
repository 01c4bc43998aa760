"""Translate structured_outputs into an llguidance grammar."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from penstock.errors import InvalidRequest
from penstock.sampling.grammar.schema.rewrite import MAX_RELAXED, write_schema
from penstock.sampling.grammar.structural_tags import TagGrammar
from penstock.types import StructuredOutputsParams

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
# These negate a subschema, so a type added inside would admit more.
_NEGATING = re.compile(r'"(?:not|if|oneOf|contains|dependentSchemas|dependencies|unevaluated\w+)"\s*:')
_REFERRING = re.compile(r'"\$\w*[rR]ef"\s*:')
_MAPS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_PARTS = ("additionalProperties", "items", "additionalItems")
_LISTS = ("items", "prefixItems", "anyOf")


def add_types(text: str) -> str:
    """Return the schema with the types that its keywords imply."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        return text
    negates = bool(_NEGATING.search(text))
    if negates and _REFERRING.search(text):  # a referenced part may be used in a negation
        _add_type(schema, _FAMILIES)
    else:
        _walk(schema, [] if negates else list(_DEFINITIONS))
    return json.dumps(schema)


def _walk(schema: Any, more: list[str], is_merged: bool = False) -> None:
    """`is_merged`: other schemas apply too, and may name other types."""
    if not isinstance(schema, dict):
        return
    _add_type(schema, ("object",) if is_merged else _FAMILIES)
    parts = [schema.get(key) for key in _PARTS]
    for key in (*_MAPS, *more):
        named = schema.get(key)
        parts += named.values() if isinstance(named, dict) else ()
    for part in chain(parts, *(_as_list(schema, key) for key in _LISTS)):
        _walk(part, more)
    for part in _as_list(schema, "allOf"):
        _walk(part, more, is_merged=True)


def _as_list(schema: dict[str, Any], key: str) -> list[Any]:
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
    return key in schema and not (key == "required" and isinstance(schema[key], bool))  # in draft 03


MAX_DEFINITIONS = 2000  # nested rules or references: each takes compiler stack
# Whitespace between JSON tokens: enough for deep indentation, too little to fill an answer.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
HAIR = 1e-9
MIN_INT64 = float(-(2**63))
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"\s*:\s*("(?:[^"\\]|\\.)*")')
_INLINE = re.compile(r"%json\s*(?=\{)")
_RULE = re.compile(r"^\s*[\w.%?!@-]+\s*(?:\[[^\]]*\])?\s*(?:::=|:)", re.MULTILINE)
_ESCAPE = re.compile(r"\\(\\|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})")


@dataclass(frozen=True)
class GrammarSource:
    """An llguidance grammar, and the keywords relaxed in it."""

    grammar: str
    relaxed: tuple[str, ...] = ()


def write_grammar(
    params: StructuredOutputsParams, special: Mapping[int, bytes] | None = None, left_out: Collection[str] = ()
) -> GrammarSource:
    """Translate `params`; `special` holds the texts of special tokens; relax the schema keywords `left_out`."""
    from llguidance import LLMatcher

    if params.regex is not None:
        return GrammarSource(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        choices = " | ".join(map(json.dumps, params.choice))
        return GrammarSource(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
    if params.grammar is not None:
        _limit("rules", len(_RULE.findall(params.grammar)))
        lark, relaxed = _write_inline(_lark(params.grammar), params.strict)
        return GrammarSource(LLMatcher.grammar_from_lark(lark), relaxed)
    if params.structural_tag is not None:
        return _write_tags(params, special or {})
    schema = '{"type": "object"}' if params.json is None else str(params.json)
    written, relaxed = _write_schema(schema, params.strict, left_out)
    return GrammarSource(LLMatcher.grammar_from_json_schema(written, None, _layout(params)), relaxed)  # type: ignore[arg-type]


def _layout(params: StructuredOutputsParams) -> dict[str, Any]:
    return {"whitespace_flexible": False} if params.disable_any_whitespace else {"whitespace_pattern": WHITESPACE}


def _write_tags(params: StructuredOutputsParams, special: Mapping[int, bytes]) -> GrammarSource:
    ids = {text.decode(errors="replace"): id for id, text in special.items() if text}
    written = json.loads(TagGrammar(ids, _lark, _layout(params)).write(str(params.structural_tag)))
    relaxed: dict[str, None] = {}
    for one in written["grammars"]:
        _limit("rules", len(_RULE.findall(one["lark_grammar"])))
        one["lark_grammar"], left_out = _write_inline(one["lark_grammar"], params.strict)
        relaxed |= dict.fromkeys(left_out)
    return GrammarSource(json.dumps(written), tuple(relaxed)[:MAX_RELAXED])


def _write_schema(schema: str, strict: bool, left_out: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    _limit("different references", len(set(_REFERENCE.findall(schema))))
    if _has_min_int64(json.loads(schema)):
        raise InvalidRequest(
            "structured_outputs: the schema contains a number near -2**63; use one above -9223372036854775000"
        )
    written, relaxed = write_schema(add_types(schema), strict, left_out)
    return _nudge_bounds(written), relaxed


def _write_inline(lark: str, strict: bool) -> tuple[str, tuple[str, ...]]:
    """Rewrite the schemas after `%json`; llguidance reports what is wrong with a missing one."""
    parts: list[str] = []
    relaxed: dict[str, None] = {}
    end = 0
    for found in _INLINE.finditer(lark):
        if found.start() < end:
            continue
        try:
            schema, length = json.JSONDecoder().raw_decode(lark[found.end() :])
        except ValueError:
            continue
        written, left_out = _write_schema(lark[found.end() : found.end() + length], strict)
        if isinstance(schema, dict) and "x-guidance" in schema:
            written = json.dumps({**json.loads(written), "x-guidance": schema["x-guidance"]})
        relaxed |= dict.fromkeys(left_out)
        parts += [lark[end : found.end()], written]
        end = found.end() + length
    return "".join([*parts, lark[end:]]), tuple(relaxed)[:MAX_RELAXED]


def _has_min_int64(part: Any) -> bool:
    """True if a number is about the smallest int64: llguidance aborts the process on it."""
    if isinstance(part, (dict, list)):
        return any(map(_has_min_int64, part.values() if isinstance(part, dict) else part))
    return isinstance(part, (int, float)) and abs(part) < 2**64 and float(part) == MIN_INT64


def _nudge_bounds(schema: str) -> str:
    """Move integral exclusive bounds inwards by a hair.

    llguidance admits the bound itself if the other bound has the same integral part: 17 for above 17 and up to 17.5.
    """
    if '"exclusiveM' not in schema:
        return schema
    described = json.loads(schema)
    _nudge(described)
    return json.dumps(described)


def _nudge(part: Any) -> None:
    if isinstance(part, list):
        for item in part:
            _nudge(item)
    if not isinstance(part, dict):
        return
    for key, value in list(part.items()):
        bound = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}.get(key)
        if isinstance(value, (dict, list)) and key not in ("const", "enum", "default", "examples"):
            _nudge(value)
        elif bound and part.get("type") != "integer" and _is_whole(value):
            part[key] = (
                max(value + HAIR, math.nextafter(value, math.inf))
                if bound > 0
                else min(value - HAIR, math.nextafter(value, -math.inf))
            )


def _is_whole(value: object) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**52 and value == int(value)
    )


def _limit(what: str, count: int) -> None:
    if count > MAX_DEFINITIONS:
        raise InvalidRequest(f"structured_outputs: {count} {what} are too many: at most {MAX_DEFINITIONS} are compiled")


def _lark(grammar: str) -> str:
    """Convert GBNF (it has `::=`) to Lark. Without recursion it becomes one terminal, an exact match; otherwise
    terminals are greedy."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import GrammarParser, gbnf_to_lark, resolve

    grammar = _ESCAPE.sub(_plain, re.sub(r"\n[ \t]*\|", " |", grammar))
    try:
        rules = GrammarParser().parse(grammar)
        resolve(rules)
        lark = gbnf_to_lark(grammar)
    except Exception as error:
        raise InvalidRequest(
            f"structured_outputs: the GBNF grammar cannot be read ({error}); correct it, or give Lark"
        ) from error
    if rules["start"].alternatives.is_terminal():
        lark = re.sub(r"^start:", "start: WHOLE\nWHOLE:", lark, count=1, flags=re.MULTILINE)
    return lark


def _plain(escape: re.Match[str]) -> str:
    """Replace a numeric escape by its character, unless GBNF gives that a meaning."""
    if escape[1] == "\\":
        return escape[0]
    code = int(escape[1][1:], 16)
    char = chr(code) if code < 0x110000 else ""
    if char in ('"', "\\", "[", "]"):
        return "\\" + char
    return char if char.isprintable() and char not in "-^" else escape[0]
