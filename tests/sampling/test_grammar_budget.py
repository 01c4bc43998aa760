"""An answer is brought to its end within its budget, and a budget that no answer fits into is refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.sampling import RowState
from penstock.sampling.grammar.compiler import CompiledGrammar, GrammarCompiler
from penstock.sampling.grammar.lexicon import Lexicon
from penstock.sampling.grammar.try_compile import prove_min_tokens
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import StructuredOutputsParams
from tests.sampling.schemas import matches
from tests.sampling.writing import write

Make = Callable[..., RowState]
NOTE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 3},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "more": {"$ref": "#/$defs/note"},
    },
    "required": ["title", "tags"],
}
NOTES = {"$ref": "#/$defs/note", "$defs": {"note": NOTE}}


def tiny_lexicon(*spelled: bytes) -> Lexicon:
    return Lexicon([*(bytes([byte]) for byte in range(256)), *spelled], {}, lambda text: list(text.encode()))


def proven(compiled: CompiledGrammar) -> tuple[int, tuple[int, ...] | None]:
    return prove_min_tokens(compiled.asked, compiled.start, compiled.lexicon, compiled.closing)


def test_every_budget_from_the_shortest_answer_on(
    make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Breaks where one token is taken that lengthens the way to the end beyond what is left."""
    asked = StructuredOutputsParams(json=NOTES)
    closing = grammars.compile(asked).closing
    assert closing is not None and len(closing) < 16
    num_forced = 0
    for max_tokens, seed in itertools.product([*range(len(closing), len(closing) + 12), 60, 150], range(3)):
        row = make_row(grammars=grammars, structured_outputs=asked, max_tokens=max_tokens, eos=[2], seed=seed)
        written = write(row, tokenizer, seed)
        assert written.reason == "stop" and len(written.tokens) <= max_tokens
        assert matches(NOTES, json.loads(written.text)), written.text
        num_forced += written.num_forced > 0
    assert num_forced > 20


def test_a_large_budget_forces_nothing(make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        row = make_row(
            grammars=grammars,
            structured_outputs=StructuredOutputsParams(regex="[a-z]{4,8}[0-9]"),
            max_tokens=400,
            seed=seed,
        )
        assert write(row, tokenizer, seed).num_forced == 0


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "(.|\\n)*END"}, r"(.|\n)*END"),
        ({"regex": "a(b{40})?c"}, "a(b{40})?c"),
        ({"grammar": 'start: WORD (" " WORD)* "."\nWORD: /[a-z]+/'}, r"[a-z]+( [a-z]+)*\."),
        ({"regex": "[a-z]+@[a-z]+\\.(com|org)"}, r"[a-z]+@[a-z]+\.(com|org)"),
    ],
)
def test_other_grammars_are_closed_too(
    make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer, structure: dict[str, Any], pattern: str
) -> None:
    for seed in range(8):
        row = make_row(
            grammars=grammars,
            structured_outputs=StructuredOutputsParams(**structure),
            max_tokens=24,
            eos=[2],
            seed=seed,
        )
        written = write(row, tokenizer, seed)
        assert written.reason == "stop" and re.fullmatch(pattern, written.text), written


def test_an_optional_part_that_does_not_fit_is_not_begun(
    make_row: Make, grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """The answer may end now, and every token but the end leads into 60 more."""
    asked = StructuredOutputsParams(regex="ok( [0-9]{60})?")
    row = make_row(grammars=grammars, structured_outputs=asked, max_tokens=20, eos=[2])
    assert write(row, tokenizer).text == "ok"


def test_budgets_that_nothing_fits_into_are_refused(grammars: GrammarCompiler) -> None:
    choice = StructuredOutputsParams(choice=["one two three four", "five six seven"])
    with pytest.raises(InvalidRequest, match="max_tokens=2 is too small for any answer .* at least 3 tokens"):
        grammars.compile(choice, 2)
    grammars.compile(choice, 3)
    booleans = {"type": "object", "properties": {name: {"type": "boolean"} for name in "abc"}, "required": list("abc")}
    schema = grammars.compile(StructuredOutputsParams(json=booleans))
    with pytest.raises(InvalidRequest, match="max_tokens=4 is too small .* at least"):
        grammars.compile(schema.asked, 4)
    assert schema.closing is not None
    grammars.compile(schema.asked, len(schema.closing))
    grammars.compile(StructuredOutputsParams(regex="(a|b|.*c)*zz"), 1)  # not known, so not refused


@pytest.mark.parametrize("pattern", ["abc", "(ab|cd){3}", "a{3,5}b?", "x(y|zz)z", "[ab]{2}c", "(abc)+d", "ab?c?d?e"])
def test_the_bound_is_the_fewest_tokens_there_are(pattern: str) -> None:
    """Against every text of up to six bytes of a small vocabulary."""
    lexicon = tiny_lexicon(b"ab", b"abc", b"cd", b"aa", b"zz", b"bc")
    compiled = GrammarCompiler(lambda: lexicon).compile(StructuredOutputsParams(regex=pattern))
    least, path = proven(compiled)
    useful = [spelled for spelled in lexicon.ids if set(spelled) <= set(b"abcdxyze")]
    texts, count = {b""}, 0
    while not any(re.fullmatch(pattern, text.decode()) for text in texts):
        texts = {text + more for text in texts for more in useful if len(text + more) <= 6}
        count += 1
    assert least == count
    assert path is not None and re.fullmatch(pattern, lexicon.bytes_of(path).decode())


def test_the_fewest_tokens_that_spell_a_text() -> None:
    """Against all ways to cut it."""
    lexicon = tiny_lexicon(b"ab", b"bcd", b"abc", b"de", b"abcde", b"ea")
    for length in range(1, 8):
        for text in itertools.islice(itertools.product(b"abcde", repeat=length), 0, 4000, 7):
            data = bytes(text)
            path = lexicon.cover(data)
            assert path is not None and lexicon.bytes_of(path) == data
            cuts = itertools.product((False, True), repeat=length - 1)
            counts = [sum(cut) + 1 for cut in cuts if all(part in lexicon.ids for part in _parts(data, cut))]
            assert len(path) == min(counts)
    assert tiny_lexicon().cover(b"") == ()
    assert Lexicon([b"a"], {}, lambda text: []).cover(b"ab") is None


def _parts(data: bytes, cut: tuple[bool, ...]) -> list[bytes]:
    parts, begin = [], 0
    for place, here in enumerate(cut, start=1):
        if here:
            parts.append(data[begin:place])
            begin = place
    return [*parts, data[begin:]]


def person(**more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, **more},
        "required": ["name", "age", *more],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "number"},
        {"type": "array", "items": {"type": "string"}, "minItems": 2},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}, "minItems": 1}]},
            "minItems": 2,
        },
    ],
)
def test_the_bound_of_schemas_with_free_strings_and_numbers(schema: dict[str, Any]) -> None:
    """Against every text of a small vocabulary; its ids close, escape and open strings along with other things."""
    lexicon = tiny_lexicon(*rb'[" a" "," ", a"," "", \" "] 1, 12 x"] [[ ],['.split())
    compiled = GrammarCompiler(lambda: lexicon).compile(StructuredOutputsParams(json=schema))
    least, _ = proven(compiled)
    useful = [spelled for spelled in lexicon.ids if set(spelled) <= set(b'[]",a1\\x')]
    texts, count = {b""}, 0
    while not any(_is_json_of(schema, text) for text in texts):
        texts = {text + more for text in texts for more in useful if _begins_json(text + more)}
        count += 1
    assert least == count


def _begins_json(text: bytes) -> bool:
    return text[:1] in b'["1' and text.count(b"[") - text.count(b"]") >= 0


def _is_json_of(schema: dict[str, Any], text: bytes) -> bool:
    try:
        return matches(schema, json.loads(text))
    except ValueError:
        return False


@pytest.mark.parametrize("schema", [person(), person(home={"type": "array", "items": person(), "minItems": 1})])
def test_the_bound_goes_on_beyond_free_strings(grammars: GrammarCompiler, schema: dict[str, Any]) -> None:
    compiled = grammars.compile(StructuredOutputsParams(json=schema))
    assert compiled.closing is not None
    least, _ = proven(compiled)
    assert len(compiled.closing) - 2 <= least <= len(compiled.closing)
    with pytest.raises(InvalidRequest, match=f"at least {least} tokens"):
        grammars.compile(compiled.asked, least - 1)
