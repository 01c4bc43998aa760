"""Strings with an expression are closed within the budget, anchored or not, and long ones too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.sampling import RowState
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.grammar.regex_examples import examples
from penstock.sampling.grammar.schema.rewrite import write_schema
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import StructuredOutputsParams
from tests.sampling.schemas import matches
from tests.sampling.writing import write

Make = Callable[..., RowState]
PATTERNS = (
    "foo",
    "^a",
    "b$",
    "[0-9]{3}",
    "(foo|bar)$",
    "^a|b$",
    r"\d{3}-\d{4}",
    "x.*y.*z",
    "zebra.*quux",
    r"^[^@]+@[^@]+\.[a-z]{2,}$",
    "q[^x]{20}w",
    "日本",
    "[äöü]$",
    r"[.]json$",
    r'say "no"',
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_end_is_found_from_anywhere(
    make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer, pattern: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = StructuredOutputsParams(json=schema)
    closing = grammars.compile(asked).closing
    assert closing is not None and len(closing) < 24
    for spare in (0, 3, 25):
        row = make_row(
            grammars=grammars, structured_outputs=asked, max_tokens=len(closing) + spare, eos=[2], seed=spare
        )
        written = write(row, tokenizer, spare)
        assert written.reason == "stop" and matches(schema, json.loads(written.text)), written


def test_many_expressions_in_one_schema(make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    names = [f"p{place}" for place in range(12)]
    properties = {name: {"type": "string", "pattern": f"{name}[0-9]{{3}}"} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    closing = grammars.compile(StructuredOutputsParams(json=schema)).closing
    assert closing is not None and matches(schema, json.loads(tokenizer.decode(list(closing))))


def test_a_long_string_is_closed(make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "string", "minLength": 1500}
    asked = StructuredOutputsParams(json=schema)
    closing = grammars.compile(asked).closing
    assert closing is not None
    row = make_row(grammars=grammars, structured_outputs=asked, max_tokens=len(closing) + 4, eos=[2])
    assert matches(schema, json.loads(write(row, tokenizer).text))
    with pytest.raises(InvalidRequest, match=r"minLength at / cannot be enforced \(it is over 4096\)"):
        write_schema('{"type": "string", "minLength": 5000}', strict=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^(?=.*[A-Z]).+$"},
        {"pattern": r"\bfoo"},
        {"pattern": r"(a)\1"},
        {"pattern": "foo", "minLength": 900},
    ],
)
def test_what_cannot_be_matched_is_refused_or_relaxed_by_name(schema: dict[str, Any]) -> None:
    text, keyword = json.dumps({"type": "string", **schema}), list(schema)[-1]
    with pytest.raises(InvalidRequest, match=f"structured_outputs: {keyword} at / cannot be enforced .*strict: false"):
        write_schema(text, strict=True)
    written, relaxed = write_schema(text, strict=False)
    assert relaxed == (f"{keyword} at /",) and keyword not in json.loads(written)


def test_examples_match_their_expressions() -> None:
    for pattern in (*PATTERNS, r"^(\S+ ){4}\S+$", "[^a1A]", "(?i:abc)", r"\w+\s\W"):
        assert examples(pattern) and all(re.search(pattern, text) for text in examples(pattern)), pattern
    for hopeless in ("(?=a)b", "x{1000000}", "(" * 200, "(a{300}){300}", r"\p{L}", "a" * 2000):
        assert examples(hopeless) == []


@pytest.mark.parametrize(
    "regex", [r'"\w+",\n   "p": [0-9]+\n\}', r"[a-z]+ [0-9]+\n", r"(x+\t)+y", r"[0-9]{4,}\n\n"], ids=ascii
)
def test_an_end_after_a_blank_is_found(
    make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer, regex: str
) -> None:
    """Breaks if the search never takes a line break where something else may follow."""
    asked = StructuredOutputsParams(regex=regex)
    for seed in range(4):
        row = make_row(grammars=grammars, structured_outputs=asked, max_tokens=40, eos=[2], seed=seed)
        written = write(row, tokenizer, seed)
        assert written.reason == "stop" and re.fullmatch(regex, written.text), written
