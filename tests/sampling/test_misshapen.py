"""Schemas and tags of a wrong shape are refused by name; nothing else fails on them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import InvalidModel, InvalidRequest
from penstock.models.pooling import pooling_from_gguf
from penstock.outputs import _extend
from penstock.sampling.grammar.schema.rewrite import write_schema
from penstock.sampling.grammar.translate import write_grammar
from penstock.types import CompletionOutput, StreamDelta, StructuredOutputsParams


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "string", "minLength": Infinity}',
        '{"maxItems": 1e400}',
        '{"format": ["date"]}',
        '{"unevaluatedProperties": false, "allOf": [{"properties": 3}]}',
        '{"unevaluatedProperties": false, "allOf": [{"allOf": 3}]}',
        '{"unevaluatedProperties": false, "$ref": "#/properties/x", "properties": {"x": {"properties": [1]}}}',
    ],
)
def test_schemas(schema: str) -> None:
    with pytest.raises(InvalidRequest, match="is not valid"):
        write_schema(schema, strict=False)


def test_a_count_beyond_all_counts_is_one() -> None:
    _, relaxed = write_schema('{"type": "object", "minProperties": 1e300, "properties": {"a": {}}}', strict=False)
    assert relaxed == ("minProperties at /",)


@pytest.mark.parametrize(
    "form",
    [
        {"type": ["tag"]},
        {"type": "any_text", "excludes": 3},
        {"type": "any_text", "excludes": [["a"]]},
        {"type": "sequence", "elements": ["a"]},
        {"type": "sequence", "elements": [{"type": "any_text"}, "b"]},
    ],
)
def test_tags(form: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="structural_tag"):
        write_grammar(StructuredOutputsParams(structural_tag=json.dumps({"format": form})), {})


def test_poolings() -> None:
    with pytest.raises(InvalidModel, match="neither mean"):
        pooling_from_gguf({"general.architecture": "bert", "bert.pooling_type": [1]})


def test_an_output_under_way_says_what_is_relaxed() -> None:
    answer = CompletionOutput(0)
    _extend(answer, StreamDelta("", 0, "", (), finish_reason="stop", relaxed=("not at /",)), False)
    assert answer.relaxed == ("not at /",)
