"""JSON whose strings and numbers may be any: texts that differ in those alone lead to the same ends."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.types import StructuredOutputsParams

# Of a schema without these, any string is as good as the empty one and any number as good as 1.
PARTICULAR = frozenset(
    {
        "enum",
        "const",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "propertyNames",
        "patternProperties",
        "contentEncoding",
        "contentMediaType",
        "uniqueItems",
        "not",
        "oneOf",
        "if",
        "dependentSchemas",
    }
)
_PARTS = re.compile(
    rb'"(?:\\.|[^"\\])*(?:\\\Z|(?P<end>"?))|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|[ \t\r\n]+|.', re.DOTALL
)


def is_plain(asked: StructuredOutputsParams) -> bool:
    if asked.json_object:
        return True
    return asked.json is not None and not _names(json.loads(asked.source)) & PARTICULAR


def _names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set().union(*map(_names, value)) if isinstance(value, list) else set()


def simplest(text: bytes) -> tuple[bytes, bool]:
    """A text with an empty string for each string but names, 1 for each number and no blanks, from which every end of
    this one is reached, too; and whether it ends within such a string."""
    parts: list[bytes] = []
    open_: list[bytes] = []
    names = within = False  # the next string is a name; the text ends within a string
    for found in _PARTS.finditer(text):
        part = found[0]
        first = part[:1]
        within = False
        if first == b'"':
            end = found["end"] or b""
            within = not names and not end
            part = part if names else b'"' + end
        elif first in b"-0123456789" and len(part) > (first == b"-"):
            part = b"1"
        elif first in b"{[":
            open_.append(first)
        elif first in b"}]" and open_:
            open_.pop()
        elif first in b" \t\r\n":
            part = b""
        if part:
            names = bool(open_) and open_[-1] == b"{" and first in b"{,"
        parts.append(part)
    return b"".join(parts), within


def closings(spelled: bytes) -> set[bytes]:
    """What an id may add to a text from the end of a string on, whatever it says before; the id before it may have
    ended with a backslash."""
    return {spelled[end:] for begin in (0, 1) if (end := _string_end(spelled, begin)) >= 0}


def _string_end(spelled: bytes, begin: int) -> int:
    while begin < len(spelled):
        if spelled[begin : begin + 1] == b'"':
            return begin
        begin += 2 if spelled[begin : begin + 1] == b"\\" else 1
    return -1
