"""What a request asks its answer to match, as llguidance reads it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidRequest
from penstock.sampling.schema import MAX_RELAXED, write_schema
from penstock.sampling.schema_types import add_types
from penstock.sampling.tags import TagGrammar
from penstock.types import StructuredOutputsParams

MAX_DEFINITIONS = 2000  # rules or references that may stand in each other: each costs the compiler stack
# Between JSON tokens: enough for a deeply indented text, too little to fill an answer with.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
HAIR = 1e-9
LEAST = float(-(2**63))
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"\s*:\s*("(?:[^"\\]|\\.)*")')
_INLINE = re.compile(r"%json\s*(?=\{)")
_RULE = re.compile(r"^\s*[\w.%?!@-]+\s*(?:\[[^\]]*\])?\s*(?:::=|:)", re.MULTILINE)
_ESCAPE = re.compile(r"\\(\\|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})")


@dataclass(frozen=True)
class Source:
    """A grammar in llguidance's words, and what of it was relaxed."""

    grammar: str
    relaxed: tuple[str, ...] = ()


def write_grammar(
    asked: StructuredOutputsParams, special: Mapping[int, bytes] | None = None, left_out: Collection[str] = ()
) -> Source:
    """`special` has the texts of special tokens; the keywords `left_out` of a schema are relaxed."""
    from llguidance import LLMatcher

    if asked.regex is not None:
        return Source(LLMatcher.grammar_from_regex(asked.regex))
    if asked.choice is not None:
        choices = " | ".join(map(json.dumps, asked.choice))
        return Source(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
    if asked.grammar is not None:
        _limit("rules", len(_RULE.findall(asked.grammar)))
        lark, relaxed = _write_inline(_lark(asked.grammar), asked.strict)
        return Source(LLMatcher.grammar_from_lark(lark), relaxed)
    if asked.structural_tag is not None:
        return _write_tags(asked, special or {})
    schema = '{"type": "object"}' if asked.json is None else str(asked.json)
    written, relaxed = _write_schema(schema, asked.strict, left_out)
    return Source(LLMatcher.grammar_from_json_schema(written, None, _layout(asked)), relaxed)  # type: ignore[arg-type]


def _layout(asked: StructuredOutputsParams) -> dict[str, Any]:
    return {"whitespace_flexible": False} if asked.disable_any_whitespace else {"whitespace_pattern": WHITESPACE}


def _write_tags(asked: StructuredOutputsParams, special: Mapping[int, bytes]) -> Source:
    ids = {text.decode(errors="replace"): id for id, text in special.items() if text}
    written = json.loads(TagGrammar(ids, _lark, _layout(asked)).write(str(asked.structural_tag)))
    relaxed: dict[str, None] = {}
    for one in written["grammars"]:
        _limit("rules", len(_RULE.findall(one["lark_grammar"])))
        one["lark_grammar"], left_out = _write_inline(one["lark_grammar"], asked.strict)
        relaxed |= dict.fromkeys(left_out)
    return Source(json.dumps(written), tuple(relaxed)[:MAX_RELAXED])


def _write_schema(schema: str, strict: bool, left_out: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    _limit("different references", len(set(_REFERENCE.findall(schema))))
    if _has_least(json.loads(schema)):
        raise InvalidRequest(
            "structured_outputs: a number about -2**63 stands in the schema, which cannot be read: "
            "use one over -9223372036854775000"
        )
    written, relaxed = write_schema(add_types(schema), strict, left_out)
    return _nudged(written), relaxed


def _write_inline(lark: str, strict: bool) -> tuple[str, tuple[str, ...]]:
    """With the schemas behind `%json` written anew; where there is none, llguidance says what is wrong."""
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


def _has_least(part: Any) -> bool:
    """Whether a number is as good as the least of 64 bits: llguidance ends the whole process over it."""
    if isinstance(part, (dict, list)):
        return any(map(_has_least, part.values() if isinstance(part, dict) else part))
    return isinstance(part, (int, float)) and abs(part) < 2**64 and float(part) == LEAST


def _nudged(schema: str) -> str:
    """With whole exclusive bounds of numbers moved inwards by a hair.

    llguidance lets such a bound itself through where the other bound has the same whole part: 17 for over 17 and up to
    17.5.
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
    """GBNF is known by its `::=`. One without recursion becomes a single terminal, which means the same to the letter;
    otherwise rules that are terminals match as much as they can."""
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
            f"structured_outputs: the GBNF grammar cannot be read ({error}): mend it, or give Lark"
        ) from error
    if rules["start"].alternatives.is_terminal():
        lark = re.sub(r"^start:", "start: WHOLE\nWHOLE:", lark, count=1, flags=re.MULTILINE)
    return lark


def _plain(escape: re.Match[str]) -> str:
    """A character for its number, unless it means something to GBNF."""
    if escape[1] == "\\":
        return escape[0]
    code = int(escape[1][1:], 16)
    char = chr(code) if code < 0x110000 else ""
    if char in ('"', "\\", "[", "]"):
        return "\\" + char
    return char if char.isprintable() and char not in "-^" else escape[0]
