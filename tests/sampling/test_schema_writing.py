"""How schemas are written anew: keyword by keyword against an independent judge, and hostile ones within bounds."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from penstock.errors import InvalidRequest
from penstock.sampling.grammar.lexicon import Lexicon
from penstock.sampling.grammar.schema.disjoint import refusal
from penstock.sampling.grammar.schema.negation import FORMATS, negate, other_strings
from penstock.sampling.grammar.schema.rewrite import write_schema
from penstock.sampling.grammar.try_compile import compile_start
from penstock.types import StructuredOutputsParams

OBJECTS = [
    dict(zip(names, values))
    for size in range(4)
    for names in itertools.combinations("abc", size)
    for values in itertools.product((1, "x"), repeat=size)
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2.5,
    4,
    7,
    12,
    "",
    "a",
    "b",
    "ab",
    "abc",
    "aab",
    "x1",
    [],
    [1],
    ["a"],
    ["a", "b"],
    ["b", "a"],
    ["a", "a"],
    [1, "a"],
    [7, 8, 2],
    *OBJECTS,
]
EXACT: list[Any] = [
    {"not": {"type": "string"}},
    {"not": {"enum": [1, "a", None]}},
    {"not": {"const": "ab"}},
    {"not": {"required": ["a"]}},
    {"not": {"required": ["a", "b"]}},
    {"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
    {"not": {"anyOf": [{"type": "object"}, {"maximum": 3}]}},
    {"not": {"minLength": 2}},
    {"not": {"minItems": 1}},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [{"maxLength": 1}, {"enum": ["a", "abc"]}, {"type": "object"}]},
    {"oneOf": [{"minimum": 4}, {"maximum": 7}]},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"if": {"type": "string"}, "else": {"type": "object"}},
    {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["c"]}, "else": {"properties": {"b": False}}},
    {"dependentRequired": {"a": ["b"], "b": ["c"]}},
    {"dependencies": {"a": {"properties": {"b": {"const": 1}}}, "c": ["a"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"propertyNames": {"enum": ["a", "b"]}},
    {"propertyNames": {"pattern": "^[ac]$"}},
    {"propertyNames": {"not": {"const": "b"}}},
    {"propertyNames": False},
    {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False},
    {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2, "additionalProperties": False},
    {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    {"uniqueItems": True, "maxItems": 1},
    {"allOf": [{"properties": {"a": True}}], "properties": {"b": {"const": 1}}, "unevaluatedProperties": False},
    {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False},
    {"$ref": "#x", "$defs": {"q": {"$anchor": "x", "type": "string"}}},
    {"items": [{"const": 1}], "additionalItems": False},
    {
        "allOf": [
            {"if": {"properties": {"a": {"const": value}}}, "then": {"required": [name]}}
            for value, name in ((1, "b"), ("x", "c"))
        ],
        "required": ["a"],
        "type": "object",
    },
]
# Matches less than the schema: where items stand, and whether properties without a name may come, is decided.
NARROWER: list[Any] = [
    {"type": "array", "contains": {"const": 1}},
    {"type": "array", "contains": {"minimum": 5}, "maxContains": 1},
    {"properties": {"a": {}, "b": {}}, "maxProperties": 2, "type": "object"},
    {"not": {"type": "integer"}},
    {
        "type": "object",
        "oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}],
        "unevaluatedProperties": False,
    },
]
RELAXED: dict[str, Any] = {
    "uniqueItems": {"uniqueItems": True},
    "not": {"not": {"pattern": "^a"}},
    "if": {"if": {"pattern": "a"}, "then": False},
    "oneOf": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
    "pattern": {"pattern": "^(?!a)"},
    "patternProperties": {"patternProperties": {"^a": {"const": 1}, "^[ab]": {"type": "string"}}},
    "propertyNames": {"propertyNames": {"format": "uuid"}},
    "minContains": {"contains": {"const": 1}, "minContains": 99},
    "unevaluatedProperties": {
        "if": {"required": ["a"]},
        "then": {"properties": {"b": True}},
        "unevaluatedProperties": False,
    },
    "unevaluatedItems": {"allOf": [{"prefixItems": [True]}], "unevaluatedItems": False},
    "minProperties": {"type": "object", "minProperties": 2},
    "maxProperties": {"allOf": [{"properties": {"a": True}}], "maxProperties": 1},
}


def judge(schema: Any) -> list[bool]:
    validator = Draft202012Validator(schema)
    return [validator.is_valid(value) for value in VALUES]


def judge_old(schema: Any) -> list[bool]:
    """As `judge`, for keywords that the last draft has other names for."""
    modern = {key: value for key, value in schema.items() if key not in ("dependencies", "items", "additionalItems")}
    if isinstance(schema.get("items"), list):
        modern |= {"prefixItems": schema["items"], "items": schema.get("additionalItems", True)}
    else:
        modern |= {"items": schema["items"]} if "items" in schema else {}
    for name, needed in schema.get("dependencies", {}).items():
        key = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        modern[key] = {**modern.get(key, {}), name: needed}
    return judge(modern)


@pytest.mark.parametrize("schema", EXACT, ids=json.dumps)
def test_the_same_in_other_words(schema: Any) -> None:
    written, relaxed = write_schema(json.dumps(schema), strict=True)
    assert relaxed == () and judge(json.loads(written)) == judge_old(schema)
    assert refusal(json.loads(written)) is None


@pytest.mark.parametrize("schema", NARROWER, ids=json.dumps)
def test_never_more_than_the_schema(schema: Any) -> None:
    written, relaxed = write_schema(json.dumps(schema), strict=True)
    pairs = list(zip(judge(json.loads(written)), judge(schema)))
    assert relaxed == () and all(given for now, given in pairs if now) and any(now for now, _ in pairs)
    assert refusal(json.loads(written)) is None


@pytest.mark.parametrize("keyword", RELAXED)
def test_never_less_than_a_relaxed_schema(keyword: str) -> None:
    schema = RELAXED[keyword]
    named = "contains" if keyword == "minContains" else keyword
    with pytest.raises(InvalidRequest, match=f"{named} at / cannot be enforced"):
        write_schema(json.dumps(schema), strict=True)
    written, relaxed = write_schema(json.dumps(schema), strict=False)
    assert relaxed == (f"{named} at /",)
    assert all(now for now, given in zip(judge(json.loads(written)), judge(schema)) if given)
    assert refusal(json.loads(written)) is None


@pytest.mark.parametrize(
    ("schema", "relaxed"),
    [
        (
            {
                "type": "object",
                "allOf": [
                    {"patternProperties": {"^a": {"type": "integer"}}},
                    {"patternProperties": {"a$": {"maximum": 5}}},
                ],
            },
            ("patternProperties at /allOf/0", "patternProperties at /allOf/1"),
        ),
        (
            {"type": "object", "allOf": [{"properties": {"a": {}}}, {"minProperties": 1}]},
            ("minProperties at /allOf/1",),
        ),
    ],
)
def test_what_cannot_be_merged(schema: Any, relaxed: tuple[str, ...]) -> None:
    """llguidance takes each of the schemas, and not both together."""
    lexicon = Lexicon([bytes([byte]) for byte in range(256)], {}, lambda text: list(text.encode()))
    with pytest.raises(InvalidRequest, match="cannot compile structured_outputs"):
        compile_start(StructuredOutputsParams(json=schema), lexicon)
    start, found = compile_start(StructuredOutputsParams(json=schema, strict=False), lexicon)
    assert found == relaxed and start.consume_tokens(list(b'{"aa": 5}'))


def test_every_string_but_some() -> None:
    strings = ["", "a", "ab", "abc", "b-]^", 'q"', "日本"]
    negated = negate({"enum": strings}, lambda _: None)
    for text in [*strings, "abcd", "c", "b", "b-]", "日", "日本語", "\n", "a\n", "]"]:
        assert Draft202012Validator(negated).is_valid(text) == (text not in strings), text
    assert refusal({"type": "string", "pattern": f"^{other_strings(strings)}$"}) is None


def test_formats_that_are_known_are_those_that_llguidance_knows() -> None:
    names = [*FORMATS, "color", "int32", "regex", "idn-email", "uri-reference", "iri", "json-pointer", "password"]
    assert {name for name in names if refusal({"type": "string", "format": name}) is None} == FORMATS


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"$ref": "https://example.com/a.json"}, "'https://example.com/a.json' leads nowhere .* nothing is fetched"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "leads back to itself",
        ),
        ({"properties": {"a": 5}}, "at /properties/a the schema is not an object"),
        ({"required": "a"}, "required: 'a' in the"),
        ({"minLength": -1}, "minLength: -1"),
        ({"allOf": {}}, "allOf"),
        ({"type": 5}, "type: 5"),
        ({"anyOf": "x"}, "anyOf"),
    ],
)
def test_what_is_no_schema(schema: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        write_schema(json.dumps(schema), strict=False)


def _hostile() -> dict[str, Any]:
    wide = {"oneOf": [{"properties": {f"p{place}": {"pattern": f"a{place}"}}} for place in range(300)]}
    chain = {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{place}": {"allOf": [{"$ref": f"#/$defs/d{place + 1}"}] * 4} for place in range(40)}
        | {"d40": {"type": "string"}},
    }
    write_for_merge = {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{place}": {"properties": {"x": {"allOf": [{"$ref": f"#/$defs/d{other}"} for other in range(12)]}}}
            for place in range(12)
        },
    }
    cases = {
        "allOf": [
            {"if": {"properties": {f"p{place}": {"const": 1}}}, "then": {"required": [f"q{place}"]}}
            for place in range(60)
        ]
    }
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"not": {"not": deep}}
    long = {"not": {"enum": ["a" * 150 + str(place) for place in range(200)]}}
    loops = {
        "$defs": {
            f"d{place}": {"properties": {f"p{other}": {"$ref": f"#/$defs/d{other}"} for other in range(60)}}
            for place in range(60)
        },
        "allOf": [{"$ref": f"#/$defs/d{place}"} for place in range(60)],
    }
    told = {
        "properties": {
            f"p{place}": {"oneOf": [{"const": f"a{place}{other}"} for other in range(60)]} for place in range(150)
        }
    }
    asked = {
        "properties": {
            f"p{place}": {"oneOf": [{"pattern": f"^a{place}{other}"} for other in range(60)]} for place in range(5)
        }
    }
    return {
        "told": told,
        "asked": asked,
        "wide": wide,
        "chain": chain,
        "merged": write_for_merge,
        "cases": cases,
        "deep": deep,
        "long": long,
        "loops": loops,
        "names": {"properties": {f"p{place}": {} for place in range(3000)}, "minProperties": 1500},
    }


@pytest.mark.parametrize("name", _hostile())
def test_hostile_schemas_take_little(name: str) -> None:
    """Written within bounds, or refused."""
    begin = time.thread_time()
    try:
        written, relaxed = write_schema(json.dumps(_hostile()[name]), strict=False)
        assert len(written) < 1 << 22 and len(relaxed) <= 32
    except InvalidRequest as error:
        assert "give a simpler one" in str(error)
    assert time.thread_time() - begin < 3
