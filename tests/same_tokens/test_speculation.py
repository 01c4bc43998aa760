"""Answers with speculation are those without, bit for bit, whatever is drafted and whatever a request asks for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.draft_tree import is_line
from penstock.engine.plan import Plan
from tests.same_tokens.roads import Answer, alone, always, answer, chunked, displaced, tiny_llm, tiny_model, together

FAMILIES = [  # rope, windows, ALiBi
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    pytest.param("BloomForCausalLM", marks=pytest.mark.slow),
]
METHODS = ["auto", pytest.param("ngram", marks=pytest.mark.slow), "suffix", "tree"]
FEW = [3, 5, 8, 13]  # tokens: so that pairs repeat and drafts come
KINDS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(temperature=1.0, seed=7),
    dict(temperature=0.9, top_p=0.8, seed=8),
    dict(temperature=1.1, top_k=3, repetition_penalty=1.1, presence_penalty=0.2, seed=9),
    dict(temperature=0.0, frequency_penalty=0.1, min_tokens=15, stop_token_ids=[13]),
    dict(temperature=0.8, seed=10, stop_token_ids=[5, 8]),
    dict(temperature=0.0, logit_bias={3: 0.5}),
    dict(temperature=1.0, seed=11, min_p=0.05, typical_p=0.9),
    dict(temperature=0.7, seed=12, mirostat=2),
    dict(temperature=0.9, seed=13, dry_multiplier=0.5, dry_sequence_breakers=[]),
]


def prompts() -> list[list[int]]:
    rng = random.Random(6)
    common = [rng.choice(FEW) for _ in range(33)]
    return [common[: rng.choice((0, 17, 33))] + [rng.choice(FEW) for _ in range(1 + i)] for i in range(2 * len(KINDS))]


def params() -> list[SamplingParams]:
    common: dict[str, Any] = dict(max_tokens=30, ignore_eos=True, logprobs=2, detokenize=False, allowed_token_ids=FEW)
    return [SamplingParams(**common, **kind) for kind in [*KINDS, *KINDS]]


@pytest.fixture(scope="module", params=FAMILIES)
def known(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[Answer]]]:
    model = tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    with tiny_llm(model) as llm:
        yield model, alone(llm, prompts(), params())


def make(model: str, method: str, **options: Any) -> LLM:
    merged = {"method": "auto", "tree": True} if method == "tree" else {"method": method}
    return always(tiny_llm(model, speculative_config={**merged, "num_speculative_tokens": 5}, **options))


@pytest.mark.parametrize("method", METHODS)
def test_together_and_again(known: tuple[str, list[Answer]], method: str) -> None:
    """The second time prefixes are cached, and the answers of the first are known to `suffix`."""
    model, answers = known
    with make(model, method) as llm:
        assert together(llm, prompts(), params()) == answers
        assert together(llm, prompts(), params()) == answers
        stats = llm.stats()
        assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] > 20
        assert sum(stats[f"num_accepted_at_{place}"] for place in range(8)) == stats["num_accepted_tokens"]
        assert stats["num_accepted_at_0"] >= stats["num_accepted_at_1"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_chunked_and_preempted(known: tuple[str, list[Answer]], method: str) -> None:
    model, answers = known
    with make(model, method, kv_cache_tokens=160, max_model_len=96, max_num_batched_tokens=40) as llm:
        assert chunked(llm, prompts(), params(), seed=1) == answers
    with make(model, method, scheduling_policy="priority", max_num_seqs=3) as llm:
        assert displaced(llm, prompts(), params()) == answers
        assert llm.stats()["num_preemptions"] > 10 and llm.stats()["num_accepted_tokens"] > 50


def test_lines_are_merged(known: tuple[str, list[Answer]]) -> None:
    """What the prompt and earlier answers propose is verified at once where it differs."""
    model, answers = known
    with make(model, "tree") as llm:
        together(llm, prompts(), params())
        plans: list[Plan] = []
        llm.service.engine.watch = plans.append
        assert together(llm, prompts(), params()) == answers
        trees = [row.draft for plan in plans for row in plan.rows if not is_line(row.draft)]
        assert trees and {one.drafter for draft in trees for one in draft} == {"ngram", "suffix"}


def test_siblings(known: tuple[str, list[Answer]]) -> None:
    model, answers = known
    with make(model, "auto") as llm:
        outputs = llm.generate(prompts(), [one.clone(n=3) for one in params()], use_tqdm=False)
        assert [answer(output) for output in outputs] == answers


def test_the_controller_itself(known: tuple[str, list[Answer]]) -> None:
    """Whatever the clock makes it do."""
    model, answers = known
    with tiny_llm(model, speculative_config="auto") as llm:
        for _ in range(2):
            assert together(llm, prompts(), params()) == answers


def test_off_drafts_nothing(known: tuple[str, list[Answer]]) -> None:
    model, answers = known
    for off in (None, False, "off"):
        with tiny_llm(model, speculative_config=off) as llm:
            assert together(llm, prompts(), params()) == answers
            assert llm.stats()["num_draft_tokens"] == 0


def test_a_drafter_that_fails_costs_no_answer(
    known: tuple[str, list[Answer]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    model, answers = known
    monkeypatch.setattr("penstock.draft.ngram.OwnText.propose", fail)
    with make(model, "auto") as llm:
        assert together(llm, prompts(), params()) == answers
        assert llm.stats()["num_failed_steps"] == llm.stats()["num_draft_tokens"] == 0
    assert "goes on without drafts" in caplog.text
