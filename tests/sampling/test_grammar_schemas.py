"""Noise in place of a model, a budget of tokens, and thousands of schemas: every answer ends, and matches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.sampling import RowState
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import StructuredOutputsParams
from tests.sampling.schemas import Schemas, matches
from tests.sampling.writing import write

END = 2
SPARE = (0, 1, 5, 20, 60, 120)  # tokens beyond the shortest answer that is known


def _count(
    make_row: Callable[..., RowState], grammars: GrammarCompiler, tokenizer: Tokenizer, seed: int, count: int
) -> tuple[int, int, list[str]]:
    """Answers that ended, answers that were brought to their end, and those that ended without matching."""
    rng, schemas = random.Random(seed), Schemas(seed)
    num_ended = num_forced = 0
    wrong = []
    for number in range(count):
        schema = schemas.next()
        asked = StructuredOutputsParams(json=schema)
        closing = grammars.compile(asked).closing
        max_tokens = (64 if closing is None else len(closing)) + rng.choice(SPARE)
        row = make_row(grammars=grammars, structured_outputs=asked, max_tokens=max_tokens, eos=[END], seed=number)
        written = write(row, tokenizer, seed=number)
        num_ended += written.reason == "stop"
        num_forced += written.num_forced > 0
        if written.reason == "stop" and not matches(schema, json.loads(written.text)):
            wrong.append(f"{written.text!r} does not match {json.dumps(schema)}")
    return num_ended, num_forced, wrong


def test_a_hundred_schemas(make_row: Callable[..., RowState], grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Breaks without the budget (a third ends too early), and with a mask that lets one wrong token through."""
    num_ended, num_forced, wrong = _count(make_row, grammars, tokenizer, seed=11, count=100)
    assert not wrong, wrong[0]
    assert num_ended >= 99
    assert num_forced > 20, "the budgets are too easy"


@pytest.mark.slow
def test_two_thousand_schemas(
    make_row: Callable[..., RowState], grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    num_ended, num_forced, wrong = _count(make_row, grammars, tokenizer, seed=7, count=2000)
    assert not wrong, wrong[0]
    assert num_ended >= 1980
    assert num_forced > 400


def test_the_judge_is_strict() -> None:
    """What the two tests above rest on."""
    assert matches({"type": "string", "format": "date"}, "2024-02-29")
    pairs: list[tuple[dict[str, Any], Any]] = [
        ({"type": "string", "format": "date"}, "2023-02-29"),
        ({"format": "uuid"}, "x"),
        ({"type": "string", "format": "ipv4"}, "1.2.3.256"),
        ({"minimum": 2}, 1),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, 2),
        ({"format": "time"}, "24:00:00Z"),
    ]
    for schema, value in pairs:
        assert not matches(schema, value)
