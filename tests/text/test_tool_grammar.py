"""Grammars that force calls: llguidance takes them, they admit what the parsers read and nothing else."""

from __future__ import annotations

import json

import pytest

from penstock.errors import InvalidRequest
from penstock.text.tools import TOOL_PARSERS
from penstock.text.tools.grammar import call_grammar
from tests.text.streams import run

llguidance = pytest.importorskip("llguidance")

WEATHER = {
    "type": "object",
    "$defs": {"count": {"type": "integer"}},
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/count"}, "metric": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]
SPECIAL = {"<tool_call>": 256, "</tool_call>": 257, "[TOOL_CALLS]": 258, "[ARGS]": 259}

ONE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
    "pythonic": '[weather(city="Oslo", days=3)]',
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "time", "arguments": {"any": [1]}}\n</tool_call>',
    "llama3_json": ONE["llama3_json"] + '; {"name": "time", "parameters": {"any": [1]}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "time", "arguments": {"any": [1]}}]',
    "pythonic": '[weather(city="Oslo", days=3), time(any=[1])]',
    "openai": ONE["openai"]
    + '<|call|><|channel|>commentary to=functions.time <|constrain|>json<|message|>{"any": [1]}',
}
PARSERS = sorted(TOOL_PARSERS)


@pytest.fixture(scope="module")
def tokenizer():
    return llguidance.LLTokenizer("byte")


def admits(tokenizer, grammar: str, text: str, special: dict[str, int] | None = None) -> bool:
    assert llguidance.LLMatcher.validate_grammar(grammar, tokenizer) == ""
    ids = list(text.encode())
    for marker, id in (special or {}).items():
        raw = list(marker.encode())
        while any(ids[at : at + len(raw)] == raw for at in range(len(ids))):
            at = next(at for at in range(len(ids)) if ids[at : at + len(raw)] == raw)
            ids[at : at + len(raw)] = [id]
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("parser", PARSERS)
def test_the_parser_reads_what_the_grammar_admits(tokenizer, parser):
    grammar = call_grammar(TOOLS, parser)
    assert admits(tokenizer, grammar, ONE[parser])
    assert admits(tokenizer, grammar, TWO[parser])
    events = run(TOOL_PARSERS[parser](lambda: "id"), [TWO[parser]])
    assert [(event[0], event[-1]) for event in events] == [
        ("call", "weather"),
        ("arguments", '{"city": "Oslo", "days": 3}'),
        ("call", "time"),
        ("arguments", '{"any": [1]}'),
    ]


@pytest.mark.parametrize("parser", PARSERS)
def test_nothing_but_calls_is_admitted(tokenizer, parser):
    grammar = call_grammar(TOOLS, parser)
    one = ONE[parser]
    for text in [
        "",
        "Hello",
        " " + one,
        one + " bye",
        one[:-1],
        one.replace("weather", "wether"),
        one.replace("3", '"3"'),
        one.replace("city", "town"),
        one.replace("days", "daze"),
    ]:
        assert not admits(tokenizer, grammar, text), text


@pytest.mark.parametrize("parser", PARSERS)
def test_one_call_when_not_parallel(tokenizer, parser):
    grammar = call_grammar(TOOLS, parser, parallel=False)
    assert admits(tokenizer, grammar, ONE[parser])
    assert not admits(tokenizer, grammar, TWO[parser])


@pytest.mark.parametrize("parser", PARSERS)
def test_a_named_function_is_the_only_one(tokenizer, parser):
    assert admits(tokenizer, call_grammar(TOOLS, parser, name="weather"), ONE[parser])
    assert not admits(tokenizer, call_grammar(TOOLS, parser, name="weather"), TWO[parser])
    assert not admits(tokenizer, call_grammar(TOOLS, parser, name="time"), ONE[parser])


@pytest.mark.parametrize(
    "parser, text",
    [("hermes", TWO["hermes"]), ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]time[ARGS]{}')],
)
def test_special_tokens_stand_for_markers(tokenizer, parser, text):
    grammar = call_grammar(TOOLS, parser, special=SPECIAL)
    assert admits(tokenizer, grammar, text, SPECIAL)
    assert not admits(tokenizer, grammar, text)
    assert not admits(tokenizer, call_grammar(TOOLS, parser, special=SPECIAL, parallel=False), text, SPECIAL)


def test_mistral_without_args_token_writes_an_array(tokenizer):
    special = {"[TOOL_CALLS]": 258}
    grammar = call_grammar(TOOLS, "mistral", special=special)
    assert admits(tokenizer, grammar, TWO["mistral"], special)
    assert admits(tokenizer, grammar, TWO["mistral"].replace("] [", "]["), special)


@pytest.mark.parametrize(
    "text, admitted",
    [
        ("city='x'", False),
        ('city="x"', True),
        ('city="x", metric=true', True),
        ('city="x", days=1, metric=false', True),
        ('metric=true, city="x"', False),
        ("days=1", False),
        ("", False),
        ('city="x", ', False),
        ('city="x", days=1.5', False),
    ],
)
def test_keyword_arguments_follow_the_schema(tokenizer, text, admitted):
    assert admits(tokenizer, call_grammar(TOOLS, "pythonic"), f"[weather({text})]") == admitted


@pytest.mark.parametrize("text", ["", "a=1", 'a=1, b_2={"c": null}'])
def test_a_function_without_parameters_takes_any(tokenizer, text):
    assert admits(tokenizer, call_grammar(TOOLS, "pythonic"), f"[time({text})]")


def test_all_keyword_arguments_may_be_optional(tokenizer):
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    grammar = call_grammar([{"function": {"name": "f", "parameters": schema}}], "pythonic")
    texts = ["", "a=1", "b=1", "a=1, b=1", "b=1, a=1", ", b=1", "a=1, "]
    admitted = [text for text in texts if admits(tokenizer, grammar, f"[f({text})]")]
    assert admitted == ["", "a=1", "b=1", "a=1, b=1"]


@pytest.mark.parametrize("name", ['a "quoted" \\ name', "größe", "😀", "a\nb"])
def test_names_are_written_as_json(tokenizer, name):
    grammar = call_grammar([{"type": "function", "function": {"name": name}}], "hermes")
    call = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)
    assert admits(tokenizer, grammar, f"<tool_call>\n{call}\n</tool_call>")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tools": []}, "at least one tool"),
        ({"name": "wether"}, "'wether', which is not among the tools; use one of weather, time"),
        ({"parser": "none"}, "use one of hermes"),
        ({"tools": [{"type": "function"}]}, "a tool must be"),
        ({"tools": [{"function": {"name": "f", "parameters": [1]}}]}, "must be a JSON schema"),
        ({"tools": [{"function": {"name": "f g"}}], "parser": "pythonic"}, "'f g' cannot be written without quotes"),
    ],
)
def test_what_cannot_be_forced_is_refused(options, message):
    with pytest.raises(InvalidRequest, match=message):
        call_grammar(**{"tools": TOOLS, "parser": "hermes", **options})
