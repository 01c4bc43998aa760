"""Tool calls in answers, as models write them, well and badly, and however the text is cut."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.answer_events import CallArguments, CallBegin, TextDelta, new_call_id
from penstock.text.tools import TOOL_PARSERS, detect_parser
from tests.text.streams import cut, places, run

QWEN = (
    'I will look that up.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {"zone": "Europe/Zurich"}}\n</tool_call>'
)
LLAMA = '{"name": "get_weather", "parameters": {"city": "San Francisco", "unit": "celsius"}}'
MISTRAL = (
    '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
    '{"name": "get_time", "arguments": {}}]'
)
PYTHONIC = "[get_weather(city=\"San Francisco\", metric=True), get_time(zone='PST', at=[1, -2.5, None])]"


def new(name: str):
    numbers = count()
    return TOOL_PARSERS[name](lambda: f"id{next(numbers)}")


def parse(name: str, *pieces: str) -> list[Any]:
    """Texts as strings, calls as (name, arguments)."""
    out: list[Any] = []
    for event in run(new(name), list(pieces)):
        if event[0] == "call":
            assert event[1:3] == (len([item for item in out if isinstance(item, tuple)]), f"id{event[1]}")
            out.append((event[3], ""))
        elif event[0] == "arguments":
            at = max(place for place, item in enumerate(out) if isinstance(item, tuple))
            out[at] = (out[at][0], event[2])
        else:
            out.append(event[1])
    return out


EXAMPLES = [
    # as the models' authors show them
    (
        "hermes",
        QWEN,
        [
            "I will look that up.\n",
            ("get_weather", '{"city": "Zürich", "days": 3}'),
            ("get_time", '{"zone": "Europe/Zurich"}'),
        ],
    ),
    ("llama3_json", LLAMA, [("get_weather", '{"city": "San Francisco", "unit": "celsius"}')]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {}}',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', [("f", "{}"), ("g", "{}")]),
    ("mistral", MISTRAL, [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]),
    (
        "mistral",
        'On it.[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]mul[ARGS]{"b": [2]}',
        ["On it.", ("add", '{"a": 1}'), ("mul", '{"b": [2]}')],
    ),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', [("add", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
    (
        "pythonic",
        PYTHONIC,
        [
            ("get_weather", '{"city": "San Francisco", "metric": true}'),
            ("get_time", '{"zone": "PST", "at": [1, -2.5, null]}'),
        ],
    ),
    ("pythonic", "<|python_start|>[f(), a.b(n=1)]<|python_end|>", [("f", "{}"), ("a.b", '{"n": 1}')]),
    ("pythonic", "Let me see.<|python_start|>[f()]<|python_end|>", ["Let me see.", ("f", "{}")]),
    # text around and between calls
    ("hermes", '\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', [("f", "{}")]),
    (
        "hermes",
        'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b <tool_call>{"name": "g", "arguments": {}}'
        "</tool_call>\nc",
        ["a ", ("f", "{}"), " b ", ("g", "{}"), "\nc"],
    ),
    ("llama3_json", 'Right: <|python_tag|>{"name": "f", "parameters": {}} done', ["Right: ", ("f", "{}"), " done"]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}] after', [("f", "{}"), " after"]),
    ("pythonic", "[f(a=1)] after", [("f", '{"a": 1}'), " after"]),
    # markers, braces, quotes and escapes within strings
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": {"a": "</tool_call> } ] \" \\", "b": "<tool_call>{"}}</tool_call>',
        [("f", r'{"a": "</tool_call> } ] \" \\", "b": "<tool_call>{"}')],
    ),
    (
        "llama3_json",
        r'{"name": "f", "parameters": {"a": "}; {\"name\": \"g\"}", "b": "\u00e9\ud83d\ude00"}}',
        [("f", r'{"a": "}; {\"name\": \"g\"}", "b": "\u00e9\ud83d\ude00"}')],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": "}[TOOL_CALLS]g{"}', [("f", '{"a": "}[TOOL_CALLS]g{"}')]),
    (
        "pythonic",
        r"""[f(a="),(] \"x\" '", b='\u00e9\n', c={"k": "}"})]""",
        [("f", r"""{"a": "),(] \"x\" '", "b": "é\n", "c": {"k": "}"}}""")],
    ),
    ("hermes", '<tool_call>{"name": "\\u0066\\ud83d\\ude00", "arguments": {}}</tool_call>', [("f😀", "{}")]),
    # white space as the model wrote it
    (
        "hermes",
        '<tool_call> { "name" : "f" ,\n "arguments" : {\n  "a" :  1\n} } </tool_call>',
        [("f", '{\n  "a" :  1\n}')],
    ),
    # arguments in a string, before the name, missing, or no object
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": " {\"a\": \"\\u00e9 \u00e9 \ud83d\ude00\\n\"}"}</tool_call>',
        [("f", r' {"a": "\u00e9 é 😀\n"}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "Paris"}</tool_call>', [("f", '"Paris"')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": " "}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null, "x": 1}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": 12}</tool_call>', [("f", "12")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
    ("llama3_json", '{"parameters": "{\\"a\\": 1}", "name": "f"}', [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "f", "parameters": ""}', [("f", "{}")]),
    # no call at all
    ("hermes", "Plain <tool> text < tool_call>.", ["Plain <tool> text < tool_call>."]),
    ("hermes", " \n", [" \n"]),
    ("llama3_json", '{"name": "Bob", "age": 3, "parameters": {}}', ['{"name": "Bob", "age": 3, "parameters": {}}']),
    ("llama3_json", '{"name": "Bob"}', ['{"name": "Bob"}']),
    ("llama3_json", '<|python_tag|>print("{}")', ['<|python_tag|>print("{}")']),
    ("llama3_json", 'See {"name": "f", "parameters": {}}', ['See {"name": "f", "parameters": {}}']),
    ("mistral", "[TOOL_CALLS] I do not know.", ["[TOOL_CALLS] I do not know."]),
    ("mistral", "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    ("mistral", "[TOOL_CALLS]", ["[TOOL_CALLS]"]),
    ("pythonic", "[1] says f(x=1).", ["[1] says f(x=1)."]),
    ("pythonic", "[link](https://a.b)", ["[link](https://a.b)"]),
    ("pythonic", "[]", ["[]"]),
    ("pythonic", "[f(x)]", ["[f(x)]"]),
    ("pythonic", "[f(x=open('y'))]", ["[f(x=open('y'))]"]),
    # malformed: what was emitted stays, the rest is text
    ("hermes", "<tool_call>\nnot json\n</tool_call>", ["<tool_call>\nnot json\n</tool_call>"]),
    (
        "hermes",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        ['<tool_call>{"name": 5, "arguments": {}}</tool_call>'],
    ),
    (
        "hermes",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "", "arguments": {}}</tool_call>'],
    ),
    (
        "hermes",
        '<tool_call>{"name" "f"}</tool_call> x <tool_call>{"name": "g"}</tool_call>',
        ['<tool_call>{"name" "f"}</tool_call> x ', ("g", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"function": {"name": "f"}}</tool_call>',
        ['<tool_call>{"function": {"name": "f"}}</tool_call>'],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>!', [("f", '{"a": }'), "!"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!', [("f", '{"a": 1}'), "!"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>!', [("f", '{"a": 1}'), "!"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}Hello', [("f", '{"a": 1}'), "Hello"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}', [("f", "{}"), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, oops]', [("f", "{}"), ", oops]"]),
    ("mistral", "[TOOL_CALLS]f(x)", ["[TOOL_CALLS]f(x)"]),
    ("pythonic", "[f(a=1, b=$), g()]", [("f", '{"a": 1'), "), g()]"]),
    ("pythonic", "[f(a=1), 2]", [("f", '{"a": 1}'), ", 2]"]),
    # cut off by length
    ("hermes", "Hm <tool_c", ["Hm <tool_c"]),
    ("hermes", '<tool_call>\n{"name": "get_wea', ['<tool_call>\n{"name": "get_wea']),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "Zü', [("f", '{"a": "Zü')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_', [("f", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"na', [("f", "{}"), '; {"na']),
    ("llama3_json", '{"name": "f", "parameters": {}}; ', [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]get_wea", ["[TOOL_CALLS]get_wea"]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, ', [("f", "{}")]),
    ("pythonic", '[f(a="x', ['[f(a="x']),
    ("pythonic", '[f(a="x", b=', [("f", '{"a": "x"')]),
]


@pytest.mark.parametrize("name, text, expected", EXAMPLES)
def test_examples(name, text, expected):
    assert parse(name, text) == expected


@given(st.sampled_from(EXAMPLES), places)
@settings(max_examples=400)
def test_cuts_change_nothing(example, where):
    name, text, expected = example
    assert parse(name, *cut(text, where)) == expected


@pytest.mark.parametrize("name, text, expected", EXAMPLES)
def test_characters_one_by_one(name, text, expected):
    assert parse(name, *text) == expected


SNIPPETS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<|python_end|>",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    '"',
    "'",
    "\\",
    ",",
    ";",
    ":",
    "=",
    " ",
    "\n",
    "f",
    "1",
    '"name": "f"',
    '"arguments": ',
    '"parameters": ',
    '{"a": 1}',
    "f(a=1)",
    "\\u00e9",
    "\\ud83d",
    "<",
    "null",
    "😀",
]


@given(st.sampled_from(sorted(TOOL_PARSERS)), st.lists(st.sampled_from(SNIPPETS), max_size=25).map("".join), places)
@settings(max_examples=600)
def test_any_text_is_taken_and_cuts_change_nothing(name, text, where):
    assert parse(name, *cut(text, where)) == parse(name, text)


@given(st.sampled_from(sorted(TOOL_PARSERS)), st.text(alphabet="ab \n.é{[<", max_size=40))
def test_text_without_a_call_comes_out_whole(name, text):
    assert "".join(parse(name, text)) == text


@pytest.mark.parametrize(
    "name, text", [("hermes", QWEN), ("llama3_json", LLAMA), ("mistral", MISTRAL), ("pythonic", PYTHONIC)]
)
def test_finish_anywhere_loses_no_text_before_the_first_call(name, text):
    full = parse(name, text)
    first = next(item for item in full if isinstance(item, tuple))
    for end in range(len(text)):
        parsed = parse(name, text[:end])
        calls = [item for item in parsed if isinstance(item, tuple)]
        if not calls:
            assert "".join(parsed) == text[:end]
        else:
            assert calls[0][0] == first[0] and first[1].startswith(calls[0][1])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(), json_values, max_size=4)


@given(arguments, arguments, st.sampled_from([None, 2]), st.booleans(), st.booleans(), places)
def test_json_calls_come_back(first, second, indent, ascii_only, wrapped, where):
    texts = [json.dumps(value, indent=indent, ensure_ascii=ascii_only) for value in (first, second)]
    calls = [
        f'{{"name": "f{place}", "arguments": {json.dumps(text) if wrapped else text}}}'
        for place, text in enumerate(texts)
    ]
    expected = [("f0", texts[0]), ("f1", texts[1])]
    for name, text in [
        ("hermes", "".join(f"<tool_call>\n{call}\n</tool_call>\n" for call in calls)),
        ("llama3_json", "; ".join(calls)),
        ("mistral", f"[TOOL_CALLS] [{', '.join(calls)}]"),
    ]:
        assert parse(name, *cut(text, where)) == expected
    named = "".join(f"[TOOL_CALLS]f{place}[ARGS]{text}" for place, text in enumerate(texts))
    assert parse("mistral", *cut(named, where)) == expected


@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), json_values, max_size=4), places)
def test_pythonic_calls_come_back(values, where):
    text = f"[f({', '.join(f'{key}={value!r}' for key, value in values.items())})]"
    [(name, got)] = parse("pythonic", *cut(text, where))
    assert (name, json.loads(got)) == ("f", values)


def test_arguments_come_as_they_are_written():
    parser = new("hermes")
    assert parser.push('<tool_call>\n{"name": "f", "argum') == []
    assert parser.push('ents": {"te') == [CallBegin(0, "id0", "f"), CallArguments(0, '{"te')]
    assert parser.push("xt") == [CallArguments(0, "xt")]
    assert parser.push('": "\\') == [CallArguments(0, '": "\\')]


def test_an_unwrapped_string_comes_as_it_is_written():
    parser = new("llama3_json")
    assert parser.push('{"name": "f", "parameters": "') == []
    assert parser.push("{") == [CallBegin(0, "id0", "f"), CallArguments(0, "{")]
    assert parser.push('\\"a\\') == [CallArguments(0, '"a')]
    assert parser.push('": \\ud83d') == [CallArguments(0, '": ')]
    assert parser.push("\\ude00") == [CallArguments(0, "😀")]


def test_each_python_argument_comes_when_it_is_complete():
    parser = new("pythonic")
    assert parser.push('[f(a="x"') == []
    assert parser.push(", b=") == [CallBegin(0, "id0", "f"), CallArguments(0, '{"a": "x"')]
    assert parser.push("2)") == [CallArguments(0, ', "b": 2}')]


@pytest.mark.parametrize(
    "name, text, shown",
    [
        ("hermes", "a <tool", "a "),
        ("hermes", "a <toolbox", "a <toolbox"),
        ("hermes", '<tool_call>{"a" x', '<tool_call>{"a" x'),
        ("llama3_json", '{"answer": 4', '{"answer": 4'),
        ("llama3_json", "x <|py", "x "),
        ("mistral", "x [TOOL_", "x "),
        ("mistral", "[TOOLS", "[TOOLS"),
        ("pythonic", "[see f", "[see f"),
        ("pythonic", "a [f(", "a [f("),
    ],
)
def test_held_back_is_only_what_may_be_a_call(name, text, shown):
    events = new(name).push(text)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == shown


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{%s"}'),
        ("hermes", '<tool_call>{"arguments": {"a": "%s"}, "name": "f"}'),
        ("hermes", "%s<"),
        ("hermes", '<tool_call>{"%s'),
        ("llama3_json", '{"name": "f", "parameters": {"a": "%s"}}'),
        ("mistral", "[TOOL_CALLS]%s{}"),
        ("pythonic", '[f(a="%s", b=1)]'),
        ("pythonic", "[%s"),
    ],
)
def test_a_long_answer_is_read_once(name, text, monkeypatch):
    """Characters that pass through the steps, each counted as often as a step is given it."""
    parser, read = new(name), 0
    text = text % ("abcdefgh" * 4000)
    push = type(parser).push

    def counting(stream, piece):
        nonlocal read
        read += len(stream._rest) + len(piece)
        return push(stream, piece)

    monkeypatch.setattr(type(parser), "push", counting)
    for at in range(0, len(text), 7):
        parser.push(text[at : at + 7])
    parser.finish()
    assert read < 2 * len(text) + 100


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", "<tool_call>"),
        ("hermes", "<"),
        ("llama3_json", '{"name": "f", "parameters": {}};'),
        ("llama3_json", "<|python_tag|>"),
        ("mistral", "[TOOL_CALLS]f{}"),
        ("mistral", "[TOOL_CALLS]"),
        ("pythonic", "<|python_tag|>[f(a='\\'')]"),
        ("pythonic", "<|python_tag|>"),
        ("hermes", " "),
    ],
)
def test_a_megabyte_in_one_push(name, text):
    whole = text * (1_000_000 // len(text))
    parsed = parse_counts(name, whole)
    assert parsed in ((len(whole) // len(text), 0), (0, len(whole)))


def parse_counts(name: str, text: str) -> tuple[int, int]:
    parser = new(name)
    events = parser.push(text) + parser.finish()
    return (
        sum(isinstance(event, CallBegin) for event in events),
        sum(len(event.text) for event in events if isinstance(event, TextDelta)),
    )


def test_ids_are_new_each_time():
    first, second = new_call_id(), new_call_id()
    assert first != second
    assert first.startswith("call_") and len(first) == 29 and int(first[5:], 16) >= 0
    events = TOOL_PARSERS["hermes"]().push('<tool_call>{"name": "f"}')
    assert isinstance(events[0], CallBegin) and events[0].id.startswith("call_")


@pytest.mark.parametrize(
    "template, name",
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("…<tool_call>…", "hermes"),
        ('{{- "[TOOL_CALLS] [" }}', "mistral"),
        ("{{- '<|python_tag|>' }}", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ('<|python_start|>… {"name": function name, "parameters": …}', "pythonic"),
    ],
)
def test_the_template_tells_the_parser(template, name):
    assert detect_parser(template) == name
