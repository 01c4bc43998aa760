"""Answers with drafts of the model's own, of functions and of texts are those without; and with all of them at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.draft.corpus import CorpusDrafter
from penstock.draft.drafter import Drafter
from penstock.draft.drafters import Drafters
from penstock.draft.function import FunctionDrafter
from penstock.draft.grammar import GrammarDrafter
from penstock.draft.lookahead import LookaheadDrafter
from penstock.draft.ngram import NgramDrafter
from penstock.draft.prediction import PredictionDrafter
from penstock.draft.suffix import SuffixDrafter
from penstock.draft.text_index import END
from penstock.text.prompt_encoder import Encoded
from tests.llm import tiny
from tests.same_tokens.roads import Answer, alone, always, answer, chunked, displaced, tiny_llm, tiny_model, together
from tests.same_tokens.test_smollm2 import Known
from tests.same_tokens.test_smollm2 import make as make_smollm2
from tests.same_tokens.test_smollm2 import params as smollm2_params
from tests.same_tokens.test_speculation import FAMILIES, params, prompts
from tests.same_tokens.test_tiny import FAMILIES as ALL_FAMILIES

SOURCES = ["lookahead", "function"]
# One pair in the default run; the grid is for `make test-all`.
PAIRS = [
    pytest.param(family, source, marks=[] if family == "LlamaForCausalLM" else [pytest.mark.slow])
    for family in FAMILIES
    for source in SOURCES
]


def make(model: str, source: str, answers: list[Answer], **options: Any) -> LLM:
    method = {"method": "lookahead" if source == "lookahead" else "suffix", "num_speculative_tokens": 5}
    texts = [[*prompt, *found[0]] for prompt, found in zip(prompts(), answers)]
    rng = random.Random(1)

    def guess(tokens: list[int]) -> list[int]:
        """Right in part."""
        found = next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])
        return [token if rng.random() < 0.8 else 1 for token in found]

    function = guess if source == "function" else None
    return always(tiny_llm(model, speculative_config=method, draft_fn=function, **options))


@pytest.mark.parametrize(("family", "source"), PAIRS)
def test_together_and_again(tmp_path: Path, family: str, source: str) -> None:
    model = tiny_model(tmp_path, family)
    with tiny_llm(model) as llm:
        answers = alone(llm, prompts(), params())
    with make(model, source, answers) as llm:
        for _ in range(2):
            assert together(llm, prompts(), params()) == answers
        stats = llm.stats()
        drafted, accepted = (stats[f"num_{kind}_tokens_of_{source}"] for kind in ("draft", "accepted"))
        assert drafted > accepted > (20 if source == "function" else 0)  # the likeliest tokens are seldom allowed here


@pytest.mark.slow
@pytest.mark.parametrize(("family", "source"), PAIRS)
def test_chunked_and_preempted(tmp_path: Path, family: str, source: str) -> None:
    model = tiny_model(tmp_path, family)
    with tiny_llm(model) as llm:
        answers = alone(llm, prompts(), params())
    with make(model, source, answers, kv_cache_tokens=160, max_model_len=96, max_num_batched_tokens=40) as llm:
        assert chunked(llm, prompts(), params(), seed=1) == answers
    with make(model, source, answers, scheduling_policy="priority", max_num_seqs=3) as llm:
        assert displaced(llm, prompts(), params()) == answers
        assert llm.stats()["num_preemptions"] > 10
        outputs = llm.generate(prompts(), [one.clone(n=3) for one in params()], use_tqdm=False)
        assert [answer(output) for output in outputs] == answers


def every_drafter(texts: Sequence[Sequence[int]], vocabulary: int) -> list[Drafter]:
    """All of the host's, those of texts from known answers."""

    def continue_known(tokens: list[int]) -> Sequence[int]:
        return next((text[len(tokens) :] for text in texts if list(text[: len(tokens)]) == tokens), ())

    host: list[Drafter] = [GrammarDrafter(), NgramDrafter(), SuffixDrafter(), PredictionDrafter(), LookaheadDrafter()]
    known = [token for text in texts for token in (*text, END)]
    return [*host, CorpusDrafter(known), FunctionDrafter(continue_known, vocabulary)]


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in ALL_FAMILIES if family != "Mamba2ForCausalLM"])
@pytest.mark.parametrize("at", range(7))
def test_every_drafter_on_every_family(tmp_path: Path, family: str, at: int) -> None:
    model = tiny_model(tmp_path, family)
    with tiny_llm(model) as llm:
        answers = alone(llm, prompts(), params())
        vocabulary = llm.service.assembly.spec.vocab_size
    texts = [[*prompt, *found[0]] for prompt, found in zip(prompts(), answers)]
    with always(tiny_llm(model, speculative_config="auto")) as llm:
        drafter = every_drafter(texts, vocabulary)[at]
        tiny.runner(llm.service).rows.drafters = Drafters([drafter], 5)
        for _ in range(2):
            assert together(llm, prompts(), params()) == answers
        drafted = llm.stats().get(f"num_draft_tokens_of_{drafter.name}", 0)
        assert drafted > 20 or drafter.name in ("grammar", "prediction")  # which these requests do not have


@pytest.mark.slow
@pytest.mark.parametrize("at", range(1, 7))
def test_every_drafter_on_smollm2(known_smollm2: Known, at: int) -> None:
    llm, answers = known_smollm2.llm, known_smollm2.answers
    texts = [[*prompt, *found[0]] for prompt, found in zip(known_smollm2.prompts, answers)]
    drafter = every_drafter(texts, llm.service.assembly.spec.vocab_size)[at]
    tiny.runner(llm.service).rows.drafters = Drafters([drafter], 5)
    for _ in range(2):
        assert together(llm, known_smollm2.prompts, smollm2_params()) == answers
    drafted = llm.stats().get(f"num_draft_tokens_of_{drafter.name}", 0)
    assert drafted > 20 or drafter.name in ("ngram", "prediction")  # short texts that do not repeat


@pytest.fixture(scope="module")
def known_smollm2() -> Iterator[Known]:
    with make_smollm2() as llm:
        known = Known(llm)
        always(llm)
        yield known


def test_64_sequences_with_different_methods(tmp_path: Path) -> None:
    """Every kind of drafter, limit and prediction in one batch, twice."""
    model = tiny_model(tmp_path, "LlamaForCausalLM")
    asked: list[Any] = [None, False, {"method": "ngram"}, {"method": "suffix"}, {"method": "lookahead"}]
    asked += [{"num_speculative_tokens": 1}, {"num_speculative_tokens": 3}]
    rng = random.Random(4)
    texts = [[rng.choice((3, 5, 8, 13)) for _ in range(rng.randint(8, 40))] for _ in range(64)]
    kinds = params()
    every = [kinds[i % len(kinds)].clone(max_tokens=16, speculation=asked[i % len(asked)]) for i in range(64)]
    with tiny_llm(model, max_num_seqs=64) as llm:
        expected = together(llm, texts, every)
    at_once = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    with always(tiny_llm(model, **at_once, speculative_config="auto")) as llm:
        known = [[*text, *found[0]] for text, found in zip(texts, expected)]
        drafters: list[Drafter] = [GrammarDrafter(), NgramDrafter(), SuffixDrafter(), PredictionDrafter()]
        drafters += [LookaheadDrafter(), CorpusDrafter(known[7]), FunctionDrafter(lambda tokens: tokens[-4:], 1000)]
        tiny.runner(llm.service).rows.drafters = Drafters(drafters, 5)
        for _ in range(2):
            collectors = [
                llm.service.submit(Encoded(text, prediction=found[0][3:] if i % 4 == 2 else ()), one)
                for i, (text, found, one) in enumerate(zip(texts, expected, every))
            ]
            while not all(collector.finished for collector in collectors):
                llm.service.step()
            assert [answer(collector.output()) for collector in collectors] == expected
        stats = llm.stats()
        used = {drafter.name for drafter in drafters if stats.get(f"num_draft_tokens_of_{drafter.name}")}
    assert used >= {"ngram", "suffix", "prediction", "lookahead", "function"} and stats["max_batch_size"] == 64
    unwanted = [one for one, wish in zip(collectors, every) if wish.speculation is False]
    assert unwanted and not any(one.drafts.list_all() for one in unwanted)


def test_stop_strings_inside_accepted_runs(tmp_path: Path) -> None:
    """Breaks when text after a stop string is shown, or tokens after it are counted."""
    tiny.write_config(tmp_path, vocab_size=320, max_position_embeddings=512)
    tiny.write_tokenizer(tmp_path)
    common: dict[str, Any] = {"load_format": "dummy", "threads": 1, "progress": False}
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=1)
    with LLM(str(tmp_path), speculative_config=None, **common) as llm:
        output = llm.generate("one two three", params, use_tqdm=False)[0]
        whole, num_prompt = output.outputs[0], len(output.prompt_token_ids)
        cuts = sorted({whole.text[at : at + 2] for at in range(len(whole.text) // 2, len(whole.text) - 2)})[:8]
        every = [params.clone(stop=cut, include_stop_str_in_output=at % 2 == 0) for at, cut in enumerate(cuts)]
        expected = [output.outputs[0] for output in llm.generate(["one two three"] * len(every), every, use_tqdm=False)]
    assert any(one.stop_reason is not None and len(one.token_ids) > 3 for one in expected)
    text = [*whole.token_ids]
    with always(LLM(str(tmp_path), **common, draft_fn=lambda tokens: text[len(tokens) - num_prompt :])) as llm:
        for one, meant in zip(every, expected):
            found = llm.generate("one two three", one, use_tqdm=False)[0].outputs[0]
            assert (found.text, found.token_ids, found.stop_reason) == (meant.text, meant.token_ids, meant.stop_reason)
            assert found.logprobs == meant.logprobs
            *_, last = streamed = list(llm.stream("one two three", one))
            assert "".join(item.text for item in streamed) == meant.text and last.stop_reason == meant.stop_reason
        assert llm.stats()["num_accepted_tokens"] > 20
