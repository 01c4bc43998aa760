"""Schemas that leave types out, as people write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.sampling import RowState
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.grammar.translate import add_types
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import StructuredOutputsParams
from tests.sampling.schemas import matches
from tests.sampling.writing import write

A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema, kind",
    [
        (A, dict),
        ({"items": {"type": "boolean"}, "maxItems": 2}, list),
        ({"pattern": "^x{1,3}$"}, str),
        ({"minimum": 3, "maximum": 9}, (int, float)),
        ({"anyOf": [A, {"minLength": 2, "maxLength": 4}]}, (dict, str)),
        ({"allOf": [A, {"properties": {"b": {"type": "null"}}}]}, dict),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, dict),
        ({**A, "oneOf": [{"required": ["b"]}, {"required": ["c"]}]}, dict),
    ],
    ids=str,
)
def test_answers_are_of_the_type_that_is_meant(
    make_row: Callable[..., RowState], grammars: GrammarCompiler, tokenizer: Tokenizer, schema: Any, kind: Any
) -> None:
    for seed in range(4):
        row = make_row(
            grammars=grammars,
            structured_outputs=StructuredOutputsParams(json=schema),
            max_tokens=40,
            eos=[2],
            seed=seed,
        )
        answer = json.loads(write(row, tokenizer, seed=seed).text)
        assert isinstance(answer, kind) and matches(schema, answer), answer


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"const": 1, "minimum": 0},
        {"enum": ["a"], "minLength": 1},
        {"type": ["string", "null"], "minLength": 1},
        {"minLength": 1, "minimum": 3},
        {"properties": {}, "items": {}},
        {"required": True},
        {"not": {"minLength": 3}},
        {"oneOf": [{"minLength": 1}, {"minimum": 1}]},
        {"if": {"properties": {"a": {"const": 1}}}, "then": {"minimum": 3}},
        {"anyOf": [{"type": "integer"}, {"type": "string"}], "pattern": "^[0-9]+$"},
        {"type": ["string", "number"], "allOf": [{"minLength": 2}, {"minimum": 3}]},
        {"type": "array", "items": {"not": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"minLength": 3}}},
    ],
    ids=json.dumps,
)
def test_where_none_is_meant_or_more_would_match(schema: Any) -> None:
    assert json.loads(add_types(json.dumps(schema))) == schema
