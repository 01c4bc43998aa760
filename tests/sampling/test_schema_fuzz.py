"""Random schemas of all keywords: one that is kept never matches more than was asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from penstock.sampling.grammar.schema.rewrite import write_schema
from tests.sampling.test_schema_writing import VALUES

NAMES = "abc"


class Random:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choice, randint = self.random.choice, self.random.randint
        self.shallow: dict[str, Callable[[int], Any]] = {
            "type": lambda _: choice(["string", "integer", "object", "array", ["string", "null"], "number", "boolean"]),
            "const": lambda _: self.value(),
            "enum": lambda _: [self.value() for _ in range(randint(1, 3))],
            "minimum": lambda _: choice([1, 4]),
            "maximum": lambda _: choice([2, 7]),
            "exclusiveMinimum": lambda _: choice([0, 4]),
            "minLength": lambda _: randint(0, 3),
            "maxLength": lambda _: randint(0, 3),
            "pattern": lambda _: choice(["^a", "b$", "^[ab]+$", "x", "^(?!a)"]),
            "required": lambda _: self.random.sample(NAMES, randint(1, 2)),
            "minItems": lambda _: randint(0, 2),
            "maxItems": lambda _: randint(0, 2),
            "minProperties": lambda _: randint(0, 2),
            "maxProperties": lambda _: randint(0, 3),
        }
        self.deep: dict[str, Callable[[int], Any]] = {
            "properties": lambda depth: {name: self.schema(depth) for name in self.random.sample(NAMES, randint(1, 3))},
            "patternProperties": lambda depth: {
                one: self.schema(depth) for one in self.random.sample(["^a", "b", "^[ac]$"], randint(1, 2))
            },
            "propertyNames": lambda _: choice(
                [{"enum": ["a", "b"]}, {"pattern": "^[ab]$"}, {"not": {"const": "a"}}, {"maxLength": 1}]
            ),
            "dependentRequired": lambda _: {choice(NAMES): self.random.sample(NAMES, 1)},
            "dependentSchemas": lambda depth: {choice(NAMES): self.schema(depth)},
            "minContains": lambda _: randint(0, 2),
            "maxContains": lambda _: randint(1, 2),
            "uniqueItems": lambda _: True,
            "unevaluatedItems": lambda _: False,
            "$ref": lambda _: "#/$defs/shared",
            **dict.fromkeys(
                ("items", "contains", "not", "if", "then", "else", "additionalProperties", "unevaluatedProperties"),
                self.schema,
            ),
            **dict.fromkeys(
                ("allOf", "anyOf", "oneOf", "prefixItems"),
                lambda depth: [self.schema(depth) for _ in range(randint(1, 3))],
            ),
        }

    def value(self) -> Any:
        return self.random.choice([1, "x", "a", "ab", None, True, 2.5, 7, ["a"], {"a": 1}])

    def schema(self, depth: int = 0) -> Any:
        if depth and self.random.random() < 0.05:
            return self.random.choice([True, False])
        keywords = self.shallow if depth > 3 else {**self.shallow, **self.deep}
        return {
            key: keywords[key](depth + 1)
            for key in self.random.sample(list(keywords), self.random.choice((1, 1, 2, 2, 3)))
        }


def _check(seed: int, count: int) -> int:
    source, num_kept = Random(seed), 0
    for _ in range(count):
        schema = {**source.schema(), "$defs": {"shared": {"type": ["string", "object"], "required": ["a"]}}}
        written, relaxed = write_schema(json.dumps(schema), strict=False)
        given, now = Draft202012Validator(schema), Draft202012Validator(json.loads(written))
        num_kept += not relaxed
        for value in VALUES if not relaxed else ():
            assert given.is_valid(value) or not now.is_valid(value), f"{value}: {written} of {json.dumps(schema)}"
    return num_kept


def test_some_schemas() -> None:
    assert _check(seed=5, count=150) > 75


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_thousands_of_schemas(seed: int) -> None:
    assert _check(seed, count=1000) > 500
