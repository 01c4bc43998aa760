"""Drafts from the model's own answers, from a function of the user's and from a text; and a request's own limits."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.api.draft_sources import MAX_CORPUS_BYTES, PIECE_CHARS, encode_corpus, read_corpus
from penstock.config.speculation import SpeculativeConfig, parse_speculation
from penstock.draft.corpus import CorpusDrafter
from penstock.draft.drafters import Drafters, make_drafters
from penstock.draft.function import FunctionCaller
from penstock.draft.lookahead import MAX_POOL, LookaheadDrafter, Trajectory
from penstock.draft.ngram import NgramDrafter
from penstock.draft.suffix import SuffixDrafter
from penstock.errors import InvalidConfig, InvalidRequest
from penstock.types import SpeculationParams
from tests.draft.test_drafters import line, row
from tests.llm import tiny


def test_answers_at_rejected_places_are_the_next_draft() -> None:
    state = row([1, 2, 3])
    drafts = Drafters([LookaheadDrafter()], 8).start(state)
    assert drafts is not None
    assert line(drafts, 4) == [1, 2, 3]  # nothing is known yet: the row's own tokens begin
    state.append(7)
    drafts.watch([7, 20, 21, 22], 1)  # 7 came, and the model would say 20, 21, 22 after what was drafted
    assert line(drafts, 4) == [20, 21, 22]
    state.append(20)
    assert line(drafts, 4) == [21, 22]
    state.append(99)
    assert line(drafts, 4) == [3, 7, 20, 99]  # they failed: the row's own again


def test_answers_are_found_again() -> None:
    """Breaks when the pool is not searched, or the last step's own answers count as a match."""
    state = row([1, 2])
    drafts = Drafters([LookaheadDrafter()], 8).start(state)
    assert drafts is not None
    state.append(5)
    drafts.watch([5, 6, 7, 8], 1)
    state.append(9)
    drafts.watch([9, 30], 1)
    for token in (5, 6):
        state.append(token)
    assert line(drafts, 4) == [7, 8]


def test_a_row_keeps_few_answers() -> None:
    followed = Trajectory([1, 2])
    for i in range(3000):
        followed.append([i])
        followed.watch([i, i + 1, -1, 5], 1)
        assert len(followed._pool) <= MAX_POOL + 4
        proposal = followed.propose(4)
        assert proposal is not None and min(proposal.tokens) >= 0


def test_a_text_is_shared_by_all() -> None:
    drafters = Drafters([CorpusDrafter([1, 2, 3, 4, 5, 6])], 8)
    for tenant in ("a", "b"):
        assert line(drafters.start(row([9, 2, 3], tenant=tenant)), 2) == [4, 5]
    assert line(drafters.start(row([9, 3, 2]))) == []


def test_a_request_limits_drafts() -> None:
    both = Drafters([NgramDrafter(), SuffixDrafter()], 8)
    both.finish(row([7, 8], [70, 71, 72]))
    prompt = [7, 8, 3, 4, 5, 7, 8]

    def drafted(asked: Any) -> list[int] | None:
        drafts = both.start(row(prompt, sampling=SamplingParams(speculation=asked)))
        return None if drafts is None else line(drafts)

    assert drafted(None) == drafted({}) == drafted({"method": "auto"}) == [3, 4, 5, 7, 8, 3, 4, 5]
    assert drafted({"num_speculative_tokens": 2}) == [3, 4]
    assert drafted({"method": "suffix"}) == [70, 71, 72]
    assert drafted({"method": "lookahead"}) == []  # the engine has none
    assert drafted(False) is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (True, "speculation=True is out of range: it must be an object, False for none, or None"),
        ("ngram", "it must be an object"),
        ({"model": "x"}, "speculation has no 'model': give method or num_speculative_tokens"),
        ({"method": "eagle9"}, "method='eagle9' is out of range: it must be one of auto, ngram"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 is out of range: it must be 1 to 32"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True is out of range"),
    ],
)
def test_a_request_that_asks_wrongly(asked: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        SamplingParams(speculation=asked)


def test_a_request_may_be_changed_and_copied() -> None:
    params = SamplingParams(speculation={"num_speculative_tokens": 3})  # type: ignore[arg-type]
    assert params.clone(n=2).speculation == SpeculationParams(num_speculative_tokens=3)
    params.speculation = False
    assert params.copy_checked().speculation is False


def test_every_method_has_its_drafter() -> None:
    for method in ("auto", "ngram", "suffix", "lookahead"):
        made = make_drafters(parse_speculation(f'{{"method": "{method}"}}'))
        assert made is not None
        assert made._choose(SpeculationParams(method)) is made.drafters or len(made.drafters) == 2
    made = make_drafters(SpeculativeConfig("ngram"), [CorpusDrafter([1, 2, 3])])
    assert made is not None and {drafter.name for drafter in made.drafters} == {"prediction", "corpus", "ngram"}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("text", "returned str"),
        (5, "returned int"),
        ({1: 2}, "returned dict"),
        ([1.5], "returned list"),
        ([None], "returned list"),
        ([100], "returned 100: token ids are 0 to 99"),
        ([3, -1], "returned -1"),
        ([True], "returned True"),
        (ValueError("planted"), "raised ValueError: planted"),
        (SystemExit(3), "raised SystemExit"),
    ],
)
def test_a_function_that_misbehaves_is_switched_off(
    returned: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def function(tokens: list[int]) -> Any:
        tokens.clear()  # it has a copy
        if isinstance(returned, BaseException):
            raise returned
        return returned

    known = [1, 2, 3]
    caller = FunctionCaller(function, 100)
    assert [caller.call(known, 8) for _ in range(3)] == [[], [], []] and known == [1, 2, 3]
    assert caller.failure is not None and words in caller.failure
    assert caplog.text.count("draft_fn is switched off") == 1


def test_a_function_that_behaves() -> None:
    caller = FunctionCaller(lambda tokens: [token + 1 for token in tokens], 100)
    assert caller.call([1, 2, 3], 2) == [2, 3] and caller.call([], 2) == []
    assert FunctionCaller(lambda tokens: None, 100).call([1], 4) == [] and caller.failure is None
    thread = caller._thread
    del caller
    thread.join(10)
    assert not thread.is_alive()


def test_a_function_that_hangs_is_left_alone() -> None:
    def hang(tokens: list[int]) -> list[int]:
        time.sleep(60)
        return [1]

    caller = FunctionCaller(hang, 100, max_call_s=0.05)
    assert caller.call([1], 4) == caller.call([1], 4) == [] and "took longer" in (caller.failure or "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_config(folder, vocab_size=320, max_position_embeddings=512)
    tiny.write_tokenizer(folder)
    return str(folder)


def make(model: str, **options: Any) -> LLM:
    return LLM(model, load_format="dummy", threads=1, progress=False, **options)


def test_no_function_harms_an_answer(model: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with make(model, speculative_config=None) as llm:
        plain = llm.generate("a text", params, use_tqdm=False)[0].outputs[0].token_ids
    for bad in (lambda tokens: [10**9], lambda tokens: 1 / 0):
        with make(model, draft_fn=bad) as llm:
            assert llm.generate("a text", params, use_tqdm=False)[0].outputs[0].token_ids == plain
            assert llm.stats()["num_failed_steps"] == 0


def test_a_function_needs_drafts(model: str) -> None:
    with pytest.raises(
        InvalidConfig, match="never called with speculative_config=off.*set by the user.*leave draft_fn"
    ):
        make(model, speculative_config=None, draft_fn=len)
    with pytest.raises(InvalidConfig, match="draft_fn=5 is not callable"):
        make(model, draft_fn=5)


def test_a_text_is_read_once_and_drafted(model: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with make(model, speculative_config=None) as llm:
        plain = llm.generate("a text", params, use_tqdm=False)[0].outputs[0]
        assert llm.tokenizer is not None
        text = "a text" + llm.tokenizer.decode(plain.token_ids, skip_special_tokens=False)
        pieces = encode_corpus("one\n" * PIECE_CHARS, llm.tokenizer)
        assert llm.tokenizer.decode(pieces) == "one\n" * PIECE_CHARS
    (tmp_path / "corpus.txt").write_text(text)
    with make(model, speculative_config={"method": "suffix", "corpus": str(tmp_path / "corpus.txt")}) as llm:
        found = llm.generate("a text", params, use_tqdm=False)[0].outputs[0]
        assert found.token_ids == plain.token_ids and found.text == plain.text


def test_texts_that_cannot_be_used(model: str, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"a" * (MAX_CORPUS_BYTES + 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text(" \n")
    words = {
        "missing": "No such file.*text file of at most 4 MiB",
        "large": "larger than 4 MiB.*leave it out",
        "binary": "not UTF-8",
        "empty": "is empty",
        ".": "directory",
    }
    for name, meant in words.items():
        with pytest.raises(InvalidConfig, match=meant):
            read_corpus(str(tmp_path / name))
    with pytest.raises(InvalidConfig, match="No such file"):
        make(model, speculative_config={"corpus": str(tmp_path / "missing")})
    with pytest.raises(InvalidConfig, match="needs a tokenizer"):
        make(model, speculative_config={"corpus": str(tmp_path / "empty")}, skip_tokenizer_init=True)
    with pytest.raises(InvalidConfig, match="corpus=5 is not valid: give the path"):
        parse_speculation('{"corpus": 5}')
