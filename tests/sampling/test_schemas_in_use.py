"""Schemas such as people have: all compile, and what is written matches them, or what is left of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from penstock.errors import InvalidRequest
from penstock.sampling import RowState
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.grammar.schema.rewrite import write_schema
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import StructuredOutputsParams
from tests.sampling.schemas import checker
from tests.sampling.writing import write

Make = Callable[..., RowState]
END = 2
SCHEMAS: dict[str, Any] = {
    one["name"]: one["schema"]
    for one in map(json.loads, (Path(__file__).parent / "schemas_in_use.jsonl").read_text().splitlines())
}
QUICK = (
    "github-workflow",
    "k8s-probe",
    "pydantic-discriminated",
    "pydantic-set",
    "rust-schemars",
    "fn-nullable-oneof",
    "std-not-const-number",
    "std-not-object",
    "std-oneOf-string-any",
    "std-if-types",
    "std-cases",
    "std-deps",
    "std-depSchemas",
    "std-propertyNames",
    "std-patternProps-overlap",
    "std-minProps",
    "std-contains",
    "std-uneval-oneOf",
    "std-id-relative",
    "std-ref-circular-siblings",
    "std-recursiveRef",
    "std-ref-mutual",
    "std-vega-ish",
    "std-pattern-unanchored",
)


def is_valid(schema: Any, value: Any) -> bool:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema, format_checker=checker).is_valid(value))


def _check(name: str, make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer, num_seeds: int) -> None:
    schema = SCHEMAS[name]
    asked = StructuredOutputsParams(json=schema, strict=False)
    compiled = grammars.compile(asked)
    assert compiled.closing is not None, "no end was found"
    written = json.loads(write_schema(json.dumps(schema), strict=False)[0])
    for seed in range(num_seeds):
        row = make_row(
            grammars=grammars,
            structured_outputs=asked,
            max_tokens=len(compiled.closing) + 40 * (seed + 1),
            eos=[END],
            seed=seed,
        )
        answer = write(row, tokenizer, seed)
        assert answer.reason == "stop", answer
        value = json.loads(answer.text)
        assert is_valid(written, value), f"{answer.text} does not match what is left: {json.dumps(written)}"
        if not compiled.facts.relaxed:
            assert is_valid(schema, value), f"{answer.text} does not match {json.dumps(schema)}"


@pytest.mark.parametrize("name", QUICK)
def test_some_schemas(name: str, make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    _check(name, make_row, grammars, tokenizer, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema(name: str, make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    _check(name, make_row, grammars, tokenizer, 12)


def test_all_are_read_and_most_are_kept_whole() -> None:
    """A strict request is refused exactly where something would be relaxed, by its name and place."""
    num_relaxed = 0
    for schema in SCHEMAS.values():
        _, relaxed = write_schema(json.dumps(schema), strict=False)
        num_relaxed += bool(relaxed)
        if relaxed:
            with pytest.raises(InvalidRequest, match=r"^structured_outputs: \w+ at /.*strict: false"):
                write_schema(json.dumps(schema), strict=True)
        else:
            write_schema(json.dumps(schema), strict=True)
    assert len(SCHEMAS) >= 120
    assert num_relaxed <= 30
