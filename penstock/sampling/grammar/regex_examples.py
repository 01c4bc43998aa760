"""Generate strings that match a regex: what a string needs before it may end shows in no bitmask."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.types import StructuredOutputsParams

if sys.version_info >= (3, 11):
    from re import _constants as ops
    from re import _parser as parser
else:
    import sre_constants as ops
    import sre_parse as parser

MAX_EXPRESSIONS = 16  # per schema
MAX_EXPRESSION = 1000  # characters each
MAX_BRANCHES = 4
MAX_LENGTH = 400  # of an example
MAX_SUFFIXES = 16
MAX_EXAMPLES = 128
MIN_LONG = 32  # minimum length that a byte search does not reach in time
LIKED = "a1A _-./:@#"  # preferred characters, best first
_LENGTHS = re.compile(r'"minLength"\s*:\s*(\d{1,9})')


class _Unknown(Exception):
    """No matching text is known."""


def string_examples(params: StructuredOutputsParams) -> list[bytes]:
    """Return texts that match the regexes of a schema, and their endings, escaped as JSON."""
    if params.json is None:
        return []
    texts: dict[str, None] = {}
    for expression in list(dict.fromkeys(_expressions(json.loads(params.source))))[:MAX_EXPRESSIONS]:
        for text in examples(expression):
            texts |= dict.fromkeys(text[begin:] for begin in range(min(len(text), MAX_SUFFIXES)))
    return [json.dumps(text, ensure_ascii=False)[1:-1].encode() for text in list(texts)[:MAX_EXAMPLES]]


def _expressions(schema: Any) -> Iterator[str]:
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("pattern"), str):
                yield part["pattern"]
            if isinstance(part.get("patternProperties"), dict):
                yield from part["patternProperties"]
            todo += part.values()
        elif isinstance(part, list):
            todo += part


def has_long_strings(params: StructuredOutputsParams) -> bool:
    return params.json is not None and any(int(least) >= MIN_LONG for least in _LENGTHS.findall(params.source))


def examples(expression: str) -> list[str]:
    """Return short texts that match the regex, one for each of its first branches."""
    if len(expression) > MAX_EXPRESSION:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FutureWarning about nested sets
            parsed: list[Any] = parser.parse(expression).data
    except (re.error, RecursionError, OverflowError):
        return []
    branches = [parsed]
    if len(parsed) == 1 and parsed[0][0] is ops.BRANCH:
        branches = [list(branch) for branch in parsed[0][1][1][:MAX_BRANCHES]]
    return [text for branch in branches for text in _sample_branches(branch)]


def _sample_branches(branch: Sequence[Any]) -> Iterator[str]:
    try:
        yield _example(branch)
    except (_Unknown, RecursionError):
        return


def _example(parts: Sequence[Any]) -> str:
    text = ""
    for op, value in parts:
        text += _part(op, value)
        if len(text) > MAX_LENGTH:
            raise _Unknown
    return text


def _part(op: Any, value: Any) -> str:
    if op is ops.LITERAL:
        return chr(value)
    if op is ops.NOT_LITERAL:
        return _pick_char([(ops.NEGATE, None), (ops.LITERAL, value)])
    if op is ops.ANY:
        return LIKED[0]
    if op is ops.IN:
        return _pick_char(value)
    if op is ops.SUBPATTERN:
        return _example(value[-1])
    if op is ops.BRANCH:
        return min((_example(branch) for branch in value[1]), key=len)
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
        least, _, part = value
        return "" if least == 0 else _example(part) * least if least <= MAX_LENGTH else _fail()
    return "" if op is ops.AT else _fail()


def _fail() -> str:
    raise _Unknown


def _pick_char(members: Sequence[Any]) -> str:
    """Return a character of the set, a preferred one if possible."""
    negated = members[0][0] is ops.NEGATE
    members = members[1:] if negated else members
    for char in LIKED:
        if any(_has(op, value, char) for op, value in members) != negated:
            return char
    for op, value in members if not negated else ():
        if op in (ops.LITERAL, ops.RANGE):
            return chr(value if op is ops.LITERAL else value[0])
    raise _Unknown


def _has(op: Any, value: Any, char: str) -> bool:
    if op is ops.LITERAL:
        return bool(ord(char) == value)
    if op is ops.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    if op is ops.CATEGORY:
        word, digit = char.isalnum() or char == "_", char.isdigit()
        known = {
            ops.CATEGORY_DIGIT: digit,
            ops.CATEGORY_NOT_DIGIT: not digit,
            ops.CATEGORY_WORD: word,
            ops.CATEGORY_NOT_WORD: not word,
            ops.CATEGORY_SPACE: char.isspace(),
            ops.CATEGORY_NOT_SPACE: not char.isspace(),
        }
        return bool(known.get(value, False))
    return False
