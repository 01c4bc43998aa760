"""Where JSON and Python values end, and what their strings say."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.tools.call_object import JsonScanner, Unescape
from penstock.text.tools.literals import MAX_DEPTH, to_json
from tests.text.streams import cut, places

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=10
)


@given(values, st.sampled_from([", 1", "}", "]", " x", "\n"]), places, st.booleans())
def test_a_value_ends_where_it_ends(value, behind, where, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    scanner, consumed = JsonScanner(), 0
    for piece in cut(text + behind, where):
        consumed += scanner.push(piece)
        if scanner.done:
            break
    assert (consumed, scanner.done) == (len(text), True)


@pytest.mark.parametrize("text", ['{"a": [1, {"b": "}"', '"abc\\"', "[", "12", "tru", '"a\\\\\\"'])
def test_an_open_value_is_not_done(text):
    scanner = JsonScanner()
    assert scanner.push(text) == len(text)
    assert not scanner.done


def test_brackets_are_counted_not_matched():
    scanner = JsonScanner()
    assert scanner.push("{'a': [1}} rest") == len("{'a': [1}}")
    assert scanner.done


@given(st.text(), st.booleans(), places)
def test_unescaping_is_the_inverse_of_escaping(text, ascii_only, where):
    unescape = Unescape()
    pieces = cut(json.dumps(text, ensure_ascii=ascii_only)[1:-1], where)
    assert "".join(map(unescape.push, pieces)) == text


@pytest.mark.parametrize(
    "escaped, text",
    [
        (r"\ud83d!", "\ufffd!"),
        (r"\ude00\ud83d\n", "\ufffd\ufffd\n"),
        (r"\q\u12zz", r"\q\u12zz"),
        ("\\ud83d\\ud83d\\ude00.", "\ufffd😀."),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_odd_escapes(escaped, text, size):
    unescape = Unescape()
    assert "".join(unescape.push(escaped[at : at + size]) for at in range(0, len(escaped), size)) == text


@given(values)
def test_python_literals_are_read_as_python_reads_them(value):
    assert json.loads(to_json(repr(value))) == json.loads(json.dumps(ast.literal_eval(repr(value))))


@pytest.mark.parametrize(
    "source, value",
    [
        ("(1, 2)", [1, 2]),
        ("(1,)", [1]),
        ("(1)", 1),
        ("()", []),
        ("[1, 2,]", [1, 2]),
        ("{'a': True, 'b': None,}", {"a": True, "b": None}),
        ("{1: 2}", {"1": 2}),
        ("true", True),
        ("null", None),
        (".5", 0.5),
        ("+1e3", 1000.0),
        (" -7 ", -7),
        ("'a' \"b\"", "ab"),
        ("'''it is \"so\"'''", 'it is "so"'),
        (r"'\x41\u00e9\U0001F600\101\0\\\'\d\/'", "Aé😀A\0\\'\\d/"),
        (r"'\ud83d\ude00'", "😀"),
        (r"'\ud83d'", "\ufffd"),
        ("'line\nbreak'", "line\nbreak"),
        ('"["', "["),
    ],
)
def test_literals(source, value):
    assert json.loads(to_json(source)) == value


@pytest.mark.parametrize(
    "source",
    [
        "",
        "x",
        "f()",
        "1 + 1",
        "__import__('os')",
        "[1",
        "1]",
        "{'a'}",
        "{'a': }",
        "{1, 2}",
        "[,]",
        "1 2",
        "f'a'",
        "1e999",
        "nan",
        "--1",
        "'a",
        "lambda: 1",
        "1.2.3",
        "12ab",
        "'\\U00ffffff'",
        "9" * 5000,
        "[" * 200_000,
        "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2),
        "{[]: 1 for x in y}",
    ],
)
def test_what_is_no_literal_is_refused(source):
    with pytest.raises(ValueError):
        to_json(source)
