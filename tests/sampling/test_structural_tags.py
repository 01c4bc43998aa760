"""Free text, and what stands between tags in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.sampling import RowState
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import StructuredOutputsParams
from tests.sampling.writing import Written, write

Make = Callable[..., RowState]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ZONE = {
    "type": "object",
    "properties": {"tz": {"enum": ["UTC", "CET"]}},
    "required": ["tz"],
    "additionalProperties": False,
}
OLDER = {
    "type": "structural_tag",
    "triggers": ["<function="],
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=time>", "schema": ZONE, "end": "</function>"},
    ],
}
JSON = {"type": "json_schema", "json_schema": ZONE}
ANY = {"type": "any_text"}
THINK = {"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"}
ZONES = r'\{\s*"tz"\s*:\s*"(UTC|CET)"\s*\}'


def tag(begin: str = "<a>", end: Any = "</a>", content: Any = JSON) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def answer(
    make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer, asked: Any, said: str = "", more: int = 24
) -> Written:
    """Written with noise for a model, after what it is made to say first."""
    generated = tokenizer.encode(said) if said else []
    row = make_row(
        grammars=grammars,
        structured_outputs=StructuredOutputsParams(structural_tag=asked),
        eos=[2],
        generated=generated,
        max_tokens=len(generated) + more,
    )
    return write(row, tokenizer, seed=3)


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ('Let me see: <function=weather>{"city": "Par', r'<function=weather>\{"city": "Par[^<]*"\s*\}</function>'),
        ("Hm <function=t", rf"Hm <function=time>{ZONES}</function>"),
        ("<function=time>", rf"<function=time>{ZONES}</function>"),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_trigger_in_free_text(
    make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer, said: str, end: str, as_text: bool
) -> None:
    written = answer(make_row, grammars, tokenizer, json.dumps(OLDER) if as_text else OLDER, said)
    assert written.reason == "stop" and re.search(end, written.text), written


def test_free_text_alone_is_an_answer(make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    written = answer(make_row, grammars, tokenizer, OLDER)
    assert written.reason == "stop" and written.num_forced == 0 and "<function" not in written.text


def triggered(**more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag()], **more}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (THINK, r"<think>(?s:.*)</think>"),
        ({"type": "sequence", "elements": [THINK, JSON]}, rf"<think>(?s:.*)</think>{ZONES}"),
        (
            {"type": "sequence", "elements": [ANY, const("Answer: "), {"type": "regex", "pattern": "[0-9]{2}/[a-z]"}]},
            r"(?s:.*)Answer: [0-9]{2}/[a-z]",
        ),
        ({"type": "sequence", "elements": [ANY, tag(end=["</a>", "</b>"])]}, rf"(?s:.*)<a>{ZONES}</[ab]>"),
        (triggered(at_least_one=True, stop_after_first=True), rf"<a>{ZONES}</a>"),
        (triggered(at_least_one=True), rf"<a>{ZONES}</a>(?s:.*)"),
        (tag("<r>", "</r>", triggered()), r"<r>(?s:.*)</r>"),
        (
            {
                "type": "tags_with_separator",
                "tags": [tag(), tag("<b>", "</b>")],
                "separator": ";",
                "at_least_one": True,
            },
            rf"<[ab]>{ZONES}</[ab]>(;<[ab]>{ZONES}</[ab]>)*",
        ),
        (
            {"type": "or", "elements": [const("yes"), {"type": "grammar", "grammar": 'root ::= "no" | "maybe"'}]},
            "yes|no|maybe",
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "optional", "content": const("p")},
                    {"type": "plus", "content": const("x")},
                    {"type": "repeat", "min": 2, "max": 3, "content": const("ab")},
                ],
            },
            r"p?x+(ab){2,3}",
        ),
        ({"type": "dispatch", "rules": [["<a>", JSON]], "loop": False}, rf"(?s:.*)(<a>{ZONES})?"),
    ],
)
def test_formats(make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer, form: Any, pattern: str) -> None:
    written = answer(make_row, grammars, tokenizer, {"type": "structural_tag", "format": form})
    assert written.reason == "stop" and re.fullmatch(pattern, written.text), written


def test_tags_that_are_special_tokens(make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    form = {"type": "sequence", "elements": [tag("<|im_start|>", "<|im_end|>"), const("!")]}
    asked = StructuredOutputsParams(structural_tag={"format": form})
    row = make_row(grammars=grammars, structured_outputs=asked, max_tokens=400, eos=[99])
    written = write(row, tokenizer)
    assert written.tokens[0] == 1 and 2 in written.tokens and written.text.endswith("!"), written


def test_schemas_within_are_relaxed_or_refused(grammars: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    asked = {"format": tag(content={"type": "json_schema", "json_schema": schema})}
    with pytest.raises(InvalidRequest, match="uniqueItems at / cannot be enforced"):
        grammars.compile(StructuredOutputsParams(structural_tag=asked))
    compiled = grammars.compile(StructuredOutputsParams(structural_tag=asked, strict=False))
    assert compiled.facts.relaxed == ("uniqueItems at /",)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"structures": [], "triggers": ["<"]}, "a list of at least one as structures"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}, "starts with a trigger"),
        ({"format": {"type": "token", "token": 5}}, "type 'token' is not supported"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "'qwen_xml' is not valid"),
        ({"format": {"type": "any_text", "max_tokens": 5}}, "max_tokens"),
        ({"format": {"type": "sequence", "elements": [ANY, JSON]}}, "a const_string or a tag after text"),
        ({"format": {"type": "repeat", "min": 1, "max": 10**9, "content": const("a")}}, "counts of 0 to 1000"),
        ({"nothing": 1}, "give format, or structures and triggers"),
    ],
)
def test_what_is_not_understood(grammars: GrammarCompiler, asked: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        grammars.compile(StructuredOutputsParams(structural_tag=asked))


def test_nested_without_end(grammars: GrammarCompiler) -> None:
    form: Any = const("a")
    for _ in range(200):
        form = {"type": "optional", "content": form}
    with pytest.raises(InvalidRequest, match="nested at most 32 deep"):
        grammars.compile(StructuredOutputsParams(structural_tag={"format": form}))
