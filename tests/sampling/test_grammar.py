"""Grammars: what they let through, where they end, and that going back is as never having gone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock.engine.plan import Draft
from penstock.errors import InvalidRequest
from penstock.sampling import RowState, Sampler
from penstock.sampling.grammar import matcher
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.grammar.try_compile import try_grammar
from penstock.sandbox.lexicon import make_lexicon
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import GrammarFacts, Request, SamplingParams, StructuredOutputsParams
from tests.sampling.writing import Written, noise, write

END = 2  # <|im_end|>
V = 49_152
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 18}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GBNF = r"""
root   ::= entry ("," entry)*   # a list
entry  ::= "(" root? ")"
         | [a-z]{2,4} "\u003D" number
number ::= "-"? [0-9]+
"""
LARK = 'start: "[" item ("," item)* "]"\nitem: NUMBER | "x"\nNUMBER: /[0-9]{1,3}/\n'
Make = Callable[..., RowState]


@pytest.fixture
def begin(make_row: Make, grammars: GrammarCompiler) -> Callable[..., RowState]:
    def make(structure: dict[str, Any], max_tokens: int = 40, **values: Any) -> RowState:
        row = make_row(
            grammars=grammars,
            structured_outputs=StructuredOutputsParams(**structure),
            max_tokens=max_tokens,
            **{"eos": [END], **values},
        )
        assert row.failure is None
        return row

    return make


Begin = Callable[..., RowState]


def allowed(row: RowState) -> set[int]:
    edited = row.edit(np.zeros(V, dtype=np.float32))
    return set(np.flatnonzero(edited > -np.inf).tolist())


def put(row: RowState, tokenizer: Tokenizer, text: str) -> None:
    """Append a text; every token of it must be allowed."""
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed(row), f"{tokenizer.token_text(token)!r} of {text!r}"
        row.append(token)


def answers(
    begin: Begin, tokenizer: Tokenizer, structure: dict[str, Any], count: int = 12, **values: Any
) -> list[Written]:
    return [write(begin(structure, seed=seed, **values), tokenizer, seed) for seed in range(count)]


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{4}",
        r"^[A-Z][a-z]{2,9} (cat|dog)s?$",
        r"(ab|c)*d",
        r"[^x]{3,10}x",
        r"é+ ?[ñ-ö]{2}",
        r"a/b\\c\.(com|org)",
    ],
)
def test_regex(begin: Begin, tokenizer: Tokenizer, pattern: str) -> None:
    for written in answers(begin, tokenizer, {"regex": pattern}):
        assert written.reason == "stop"
        assert re.fullmatch(pattern, written.text), written.text


def test_choice(begin: Begin, tokenizer: Tokenizer) -> None:
    choices = ["red", "redder", 'a "quoted" one', "naïve 日本", "<|im_end|>"]
    found = {
        written.text if written.text else "<|im_end|>"
        for written in answers(begin, tokenizer, {"choice": choices}, count=40)
    }
    assert found <= set(choices) and len(found) >= 3


def test_json_object(begin: Begin, tokenizer: Tokenizer) -> None:
    for written in answers(begin, tokenizer, {"json_object": True}):
        assert written.reason == "stop" and isinstance(json.loads(written.text), dict)


def test_no_whitespace(begin: Begin, tokenizer: Tokenizer) -> None:
    for written in answers(begin, tokenizer, {"json": PERSON, "disable_any_whitespace": True}):
        assert re.fullmatch(r'\{"name":".*","age":\d+\}', written.text, re.DOTALL), written.text
    assert any(re.search(r'": | "|\n', written.text) for written in answers(begin, tokenizer, {"json": PERSON}))


def test_lark(begin: Begin, tokenizer: Tokenizer) -> None:
    for written in answers(begin, tokenizer, {"grammar": LARK}):
        assert re.fullmatch(r"\[(\d{1,3}|x)(,(\d{1,3}|x))*\]", written.text), written.text


def test_gbnf(begin: Begin, tokenizer: Tokenizer) -> None:
    """A recursive grammar with comments, alternatives on lines of their own and escapes."""
    for written in answers(begin, tokenizer, {"grammar": GBNF}, max_tokens=60):
        text = written.text
        while (reduced := re.sub(r"\(([a-z]{2,4}=-?\d+(,[a-z]{2,4}=-?\d+)*)?\)", "aa=1", text)) != text:
            text = reduced
        assert re.fullmatch(r"[a-z]{2,4}=-?\d+(,[a-z]{2,4}=-?\d+)*", text), written.text


def test_gbnf_without_recursion_is_matched_to_the_letter(begin: Begin, tokenizer: Tokenizer) -> None:
    """Breaks where `word` takes all letters and leaves none for the last one."""
    row = begin({"grammar": 'root ::= word "a"\nword ::= [a-z]+'})
    put(row, tokenizer, "banana")
    assert END in allowed(row)


def test_a_complete_answer_ends_without_another_token(begin: Begin, tokenizer: Tokenizer) -> None:
    row = begin({"json": PERSON})
    put(row, tokenizer, '{"name": "Ada", "age": 36')
    assert not row.is_finished and END not in allowed(row)
    put(row, tokenizer, "}")
    assert row.is_finished


def test_an_answer_that_may_go_on_may_also_end(begin: Begin, tokenizer: Tokenizer) -> None:
    row = begin({"choice": ["red", "redder"]})
    put(row, tokenizer, "red")
    assert not row.is_finished
    assert END in allowed(row) and len(allowed(row)) > 1
    row.append(END)
    assert row.is_finished
    silent = begin({"choice": ["red", "redder"]}, ignore_eos=True)
    put(silent, tokenizer, "red")
    assert END not in allowed(silent) and allowed(silent)
    endless = begin({"choice": ["red", "redder"]}, eos=[])
    put(endless, tokenizer, "redder")
    assert endless.is_finished


def test_special_tokens_are_never_text(begin: Begin, tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    """Not even where the text of one is asked for; but a grammar may name one."""
    row = begin({"json": {"const": "<|im_end|>!"}})
    for token in grammars.lexicon.cover(b'"<|im_end|>!"') or ():
        assert not tokenizer.special_ids & allowed(row)
        row.append(token)
    assert row.is_finished and tokenizer.decode(row.tokens[3:]) == '"<|im_end|>!"'
    assert not tokenizer.special_ids & allowed(begin({"regex": r"(.|\n)+"}))
    named = begin({"grammar": 'start: "a" <|im_start|> "b"'})
    put(named, tokenizer, "a")
    assert allowed(named) == {1}


def test_sentencepiece(make_row: Make, pieces: Tokenizer) -> None:
    """Pieces that begin with a space, and characters that only byte tokens can spell."""
    made = GrammarCompiler(lambda: make_lexicon(pieces))
    rare = "\U0001fae8 \u2581x"
    structures: list[dict[str, Any]] = [{"json": PERSON}, {"choice": [rare]}, {"regex": "[a-z ]{4,9}, [0-9]{2}"}]
    for structure in structures:
        for seed in range(3):
            row = make_row(
                grammars=made,
                structured_outputs=StructuredOutputsParams(**structure),
                max_tokens=30,
                eos=pieces.eos_token_ids,
                seed=seed,
            )
            written = write(row, pieces, seed)
            assert written.reason == "stop" and not pieces.special_ids & set(written.tokens)
            if "json" in structure:
                assert json.loads(written.text)["age"] >= 18
            elif "choice" in structure:
                assert written.text.replace(" ", "\u2581") == rare.replace(" ", "\u2581")
            else:
                assert re.fullmatch(structure["regex"], written.text)


def test_rolled_back_is_as_never_advanced(begin: Begin, tokenizer: Tokenizer) -> None:
    """After every beginning of an answer, past the end and back included."""
    for structure in ({"json": PERSON}, {"regex": "(ab)*c?"}, {"grammar": LARK}):
        whole = write(begin(structure, seed=3), tokenizer, 3).tokens
        row, rng = begin(structure, seed=3), np.random.default_rng(0)
        for count in range(len(whole)):
            fresh = begin(structure, seed=3, generated=whole[:count])
            for token in whole[count : count + int(rng.integers(1, 6))]:
                row.append(token)
            row.truncate(3 + count)
            assert allowed(row) == allowed(fresh) and row.is_finished == fresh.is_finished
            row.append(whole[count])


def test_resumed_goes_the_same_way(begin: Begin, tokenizer: Tokenizer) -> None:
    """Also where the budget runs short: what is forced follows from the tokens alone."""
    for seed in range(3):
        for max_tokens in (14, 30, 60):
            truth = write(begin({"json": PERSON}, max_tokens, seed=seed), tokenizer, seed)
            for cut in range(0, len(truth.tokens), 7):
                resumed = begin({"json": PERSON}, max_tokens, seed=seed, generated=truth.tokens[:cut])
                assert write(resumed, tokenizer, seed).tokens == truth.tokens


def test_drafts_change_nothing(begin: Begin, tokenizer: Tokenizer) -> None:
    for seed in range(6):
        truth = write(begin({"json": PERSON}, 30, seed=seed), tokenizer, seed)
        row, rng = begin({"json": PERSON}, 30, seed=seed), np.random.default_rng(seed)
        while not row.is_finished and row.num_generated < 30:
            ahead = truth.tokens[row.num_generated :][: int(rng.integers(0, 4))]
            draft = tuple(Draft(token if rng.random() < 0.8 else 5, i - 1) for i, token in enumerate(ahead))
            logits = np.concatenate([noise(seed, row.num_generated + i).numpy() for i in range(1 + len(draft))])
            for one in Sampler().verify(logits, row, draft):
                assert one.error is None
                row.append(one.token)
        assert row.tokens[3:] == truth.tokens


def test_equal_seeds_equal_answers_and_siblings_differ(begin: Begin, tokenizer: Tokenizer) -> None:
    texts = [write(begin({"json": PERSON}, seed=1, sibling=sibling), tokenizer, 1).text for sibling in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_penalties_and_log_probabilities(begin: Begin, tokenizer: Tokenizer) -> None:
    """Log probabilities are the model's own: a forbidden token has its rank among them."""
    row = begin({"json": PERSON}, presence_penalty=1.5, repetition_penalty=1.3, logprobs=2)
    logits = noise(0, 0)
    sampled = Sampler().sample(logits, [row])[0]
    report = sampled.logprobs
    assert report is not None and set(report) == {sampled.token, *logits[0].topk(2).indices.tolist()}
    assert report[sampled.token].rank == 1 + int((logits[0] > logits[0, sampled.token]).sum())
    assert write(row, tokenizer).reason == "stop"


def test_nothing_left_to_choose_names_the_grammar(begin: Begin) -> None:
    row = begin({"regex": "[0-9]+"}, allowed_token_ids=[100, 200])
    error = Sampler().sample(noise(0, 0), [row])[0].error
    assert error is not None and error.startswith("structured_outputs, allowed_token_ids (2)")


def test_a_failing_grammar_fails_its_row_alone(make_row: Make, grammars: GrammarCompiler, begin: Begin) -> None:
    """Tokens that do not match, as after a change of the request between two admissions."""
    asked = StructuredOutputsParams(json=PERSON)
    broken = make_row(grammars=grammars, structured_outputs=asked, generated=[5, 6, 7])
    fine = begin({"json": PERSON})
    first, second = Sampler().sample(noise(0, 0).repeat(2, 1), [broken, fine])
    assert first.error is not None and "the grammar cannot go on" in first.error
    assert second.error is None


@pytest.mark.parametrize(
    ("structure", "parts"),
    [
        ({"json": {"type": "strin"}}, ["cannot compile structured_outputs", "Invalid type: strin"]),
        ({"json": {"$ref": "#/nowhere"}}, ["/nowhere"]),
        ({"json": {"not": {}}}, ["Unsatisfiable schema"]),
        ({"json": {"type": "array", "uniqueItems": True}}, ["uniqueItems at /", "strict: false"]),
        ({"regex": "(a|b"}, ["unclosed group"]),
        ({"regex": "(?=a)b"}, ["look-around"]),
        ({"grammar": "start: nothing"}, ["unknown name"]),
        ({"grammar": 'root ::= "a'}, ["GBNF", "Unexpected end"]),
        ({"grammar": "root ::= other"}, ["GBNF", "other"]),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, ["cannot compile structured_outputs"]),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    grammars: GrammarCompiler, structure: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(StructuredOutputsParams(**structure))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("structure", "parts"),
    [
        ({}, ["exactly one of json, regex, choice, grammar, json_object"]),
        ({"regex": "a", "choice": ["b"]}, ["['regex', 'choice']", "exactly one"]),
        ({"json_object": False}, ["exactly one"]),
        ({"json": "{bad"}, ["json='{bad'", "a JSON schema"]),
        ({"json": "[1]"}, ["not an object"]),
        ({"json": 3}, ["json=3"]),
        ({"json": {"a": {1, 2}}}, ["json={'a': {1, 2}}"]),
        ({"regex": ""}, ["regex=''", "non-empty"]),
        ({"regex": 3}, ["regex=3"]),
        ({"choice": []}, ["choice", "at least one"]),
        ({"choice": "yes"}, ["choice='yes'", "a list"]),
        ({"choice": ["a", 1]}, ["choice=1"]),
        ({"regex": "\ud800"}, ["lone surrogate", "position 0"]),
        ({"regex": "a" * 600_000}, ["600000 bytes", "524288"]),
        ({"json": "[" * 100_000}, ["json"]),
    ],
)
def test_what_is_not_understood_is_refused(structure: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputsParams(**structure)
    for part in parts:
        assert part in str(caught.value), caught.value


def test_params_are_plain_data() -> None:
    asked = StructuredOutputsParams(json=PERSON)
    assert asked.json == json.dumps(PERSON)
    assert SamplingParams(structured_outputs=asked).clone(n=2).structured_outputs == asked
    assert StructuredOutputsParams(choice=["a", "b", "a"]).choice == ("a", "b")
    with pytest.raises(InvalidRequest, match="structured_outputs="):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def _chain(count: int, *names: str) -> dict[str, Any]:
    """Definitions that lead each to the next."""
    links = {
        f"d{i}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in names}}
        for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


def test_bombs_are_compiled_or_refused_in_time(grammars: GrammarCompiler, begin: Begin) -> None:
    """Breaks by a crash where the compiler runs on the caller's stack: 1,000 definitions overflow 8 MB."""
    bombs: list[dict[str, Any]] = [
        {"json": _chain(10_000, "a")},
        {"json": _chain(1900, "a", "b")},
        {"json": {"type": "array", "prefixItems": [{"$ref": "#/$defs/x"}] * 10_000, "$defs": {"x": {"type": "null"}}}},
        {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000)) + '\nr9000: "a"'},
        {"grammar": "start: r0\n" + "\n".join(f'r{i}: "x" r{i + 1}' for i in range(1900)) + '\nr1900: "a"'},
        {"regex": "((a{1,100}){1,100}){1,100}"},
        {"regex": "(.{0,1000}x){0,1000}"},
        {"regex": "(a|b)*a(a|b){40}"},
        {"regex": "x{100000}"},
        {"json": {"type": "string", "maxLength": 1_000_000}},
        {"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(8)]} for i in range(8)]}},
    ]
    outcomes = []
    for bomb in bombs:
        began = time.perf_counter()
        try:
            asked = StructuredOutputsParams(**bomb)
            grammars.compile(asked)
            allowed(begin(bomb))
            outcomes.append("compiled")
        except InvalidRequest as error:
            assert len(str(error)) < 500
            outcomes.append("refused")
        assert time.perf_counter() - began < 15
    assert outcomes[:2] == ["refused", "compiled"] and set(outcomes) == {"refused", "compiled"}


def test_no_grammar_is_charged_for_the_vocabulary(grammars: GrammarCompiler) -> None:
    def slowly() -> Any:
        time.sleep(2.2)
        return grammars.lexicon

    assert GrammarCompiler(slowly, compile_s=2.0).compile(StructuredOutputsParams(regex="ab")).closing


def test_a_burst_is_compiled_and_equal_grammars_once(grammars: GrammarCompiler) -> None:
    """Breaks where those beyond the first few are refused instead of waiting, or where each compiles for itself."""
    tried = []

    def trial(asked: StructuredOutputsParams, max_tokens: int) -> GrammarFacts:
        tried.append(asked)
        time.sleep(0.02)
        return try_grammar(grammars.lexicon, asked, max_tokens)

    made = GrammarCompiler(lambda: grammars.lexicon, trial)
    asked = [StructuredOutputsParams(regex=f"burst{number % 8}") for number in range(32)]
    with ThreadPoolExecutor(32) as pool:
        compiled = list(pool.map(made.compile, asked))
    assert len(tried) == 8 and all(one is compiled[at % 8] for at, one in enumerate(compiled))


def test_a_trial_that_takes_too_long_is_refused_and_leaves_the_others(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = GrammarCompiler(lambda: grammars.lexicon, compile_s=0.2)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.sampling.grammar.compiler.try_grammar", lambda *_: time.sleep(1))
        with pytest.raises(InvalidRequest, match="not compiled within 0.2 s"):
            slow.compile(StructuredOutputsParams(regex="slow"))
    slow.compile_s = 10
    assert slow.compile(StructuredOutputsParams(regex="known")).closing


def test_an_answer_whose_masks_take_too_long_ends(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(id="r", tokens=(1,))
    one = grammars.compile(StructuredOutputsParams(regex="a+b")).begin(request)
    monkeypatch.setattr(matcher, "MAX_MASKS_S", -1.0)
    with pytest.raises(matcher.GrammarFailed, match="is too slow"):
        one.bitmask(64)


def test_grammars_are_kept_while_used_and_for_a_while(grammars: GrammarCompiler) -> None:
    made = GrammarCompiler(lambda: grammars.lexicon)
    held = made.compile(StructuredOutputsParams(regex="held"))
    for number in range(70):
        made.compile(StructuredOutputsParams(regex=f"r{number}"))
    assert made.compile(StructuredOutputsParams(regex="held")) is held
    assert len(made._kept) <= 64


@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 1, float(-(2**63))])
def test_the_least_of_64_bits_is_refused(grammars: GrammarCompiler, number: float) -> None:
    """llguidance 1.9.1 overflows its stack over it, and takes the process with it."""
    with pytest.raises(InvalidRequest, match="a number near -2"):
        grammars.compile(StructuredOutputsParams(json={"enum": [{"a": [number]}, "y"]}))
    grammars.compile(StructuredOutputsParams(json={"enum": [-9223372036854775000, 2**63 - 1]}))
