"""Grammars of answers that may call: text is free, a call that is begun is of the tools and as strict as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.text.tools import TOOL_PARSERS
from penstock.text.tools.grammar import open_grammar
from tests.text.streams import run
from tests.text.test_tool_grammar import ONE, PARSERS, SPECIAL, TOOLS, TWO, admits

llguidance = pytest.importorskip("llguidance")
TEXTS = ["", "Hello, the weather is fine.\n\nBye <b>now</b> (really) {x} [y]", "  <tool_cal l>"]
NEWER = '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]time[ARGS]{}'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return llguidance.LLTokenizer("byte")


@pytest.mark.parametrize("parser", PARSERS)
def test_text_or_calls(tokenizer: Any, parser: str) -> None:
    grammar = open_grammar(TOOLS, parser)
    for text in [*TEXTS, ONE[parser], TWO[parser]]:
        assert admits(tokenizer, grammar, text), text
    for wrong in (("weather", "wether"), ("3", '"3"'), ("city", "town"), ("days", "daze")):
        assert not admits(tokenizer, grammar, ONE[parser].replace(*wrong)), wrong


@pytest.mark.parametrize("parser", PARSERS)
def test_a_tool_that_is_not_strict_takes_any_arguments(tokenizer: Any, parser: str) -> None:
    relaxed: Any = json.loads(json.dumps(TOOLS[0]))
    relaxed["function"]["strict"] = False
    grammar = open_grammar([relaxed], parser)
    assert admits(tokenizer, grammar, ONE[parser].replace("days", "daze").replace("3", '"3"'))
    assert not admits(tokenizer, grammar, TWO[parser])


@pytest.mark.parametrize("parser", ["hermes", "mistral"])
def test_calls_behind_text(tokenizer: Any, parser: str) -> None:
    text = "Let me see.\n" + ONE[parser]
    assert admits(tokenizer, open_grammar(TOOLS, parser), text)
    assert not admits(tokenizer, open_grammar(TOOLS, parser), text.replace("city", "town"))
    assert [event[0] for event in run(TOOL_PARSERS[parser](lambda: "id"), [text])] == ["text", "call", "arguments"]


def test_one_call_when_not_parallel(tokenizer: Any) -> None:
    for parser in PARSERS:
        grammar = open_grammar(TOOLS, parser, parallel=False)
        assert admits(tokenizer, grammar, ONE[parser]) and not admits(tokenizer, grammar, TWO[parser])


def test_markers_that_are_tokens(tokenizer: Any) -> None:
    vocabulary = [bytes([byte]) for byte in range(256)] + [marker.encode() for marker in SPECIAL] + [b"<end>"]

    class Wrapped:
        tokens, special_token_ids, bos_token_id, eos_token_id = vocabulary, list(range(256, 261)), None, 260

        def __call__(self, text: str) -> list[int]:
            return list(text.encode())

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()))
    assert admits(tokenizer, open_grammar(TOOLS, "hermes", special=SPECIAL), "Hm. " + TWO["hermes"], SPECIAL)
    assert admits(tokenizer, open_grammar(TOOLS, "mistral", special=SPECIAL), "Hm. " + NEWER, SPECIAL)
    assert not admits(
        tokenizer, open_grammar(TOOLS, "mistral", special=SPECIAL), NEWER.replace("city", "town"), SPECIAL
    )


@pytest.mark.parametrize("parser", PARSERS)
def test_calls_or_an_answer_of_its_own_schema(tokenizer: Any, parser: str) -> None:
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["clear", "grey"]}},
        "required": ["sky"],
        "additionalProperties": False,
    }
    grammar = open_grammar(TOOLS, parser, answer=json.dumps(schema))
    one_only = parser == "llama3_json"
    for text in (ONE[parser], ONE[parser] if one_only else TWO[parser], '{"sky": "grey"}', '{\n  "sky": "clear"\n}'):
        assert admits(tokenizer, grammar, text), text
    for text in ("Hello", '{"sky": "red"}', ONE[parser].replace("city", "town"), "Hm. " + ONE[parser]):
        assert not admits(tokenizer, grammar, text), text
    assert admits(tokenizer, open_grammar(TOOLS, parser, answer="true"), "[1]")
