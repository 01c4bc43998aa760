"""The same roads on the default model, with its real weights and text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from tests.agreement.reference import PROMPTS as SHORT
from tests.agreement.reference import model_path
from tests.same_tokens.roads import Answer, Branching, alone, answer, chunked, displaced, drafted, together

NUM_TOKENS = 10
SYSTEM = "You are a careful assistant that answers in one short sentence and never guesses. "


def texts() -> list[str]:
    """Short and long, half of them beginning alike."""
    return [SYSTEM * (i % 3) + SHORT[i] for i in range(10)]


def params() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [dict(temperature=0.0), dict(temperature=0.9, top_p=0.95, seed=11)]
    return [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, **kinds[i % 2]) for i in range(len(texts()))
    ]


def make(**options: object) -> LLM:
    return LLM(str(model_path("smollm2")), progress=False, **{"max_model_len": 512, **options})


class Known:
    def __init__(self, llm: LLM) -> None:
        assert llm.tokenizer is not None
        self.llm = llm
        self.prompts = [llm.tokenizer.encode(text) for text in texts()]
        self.answers: list[Answer] = alone(llm, self.prompts, params())


@pytest.fixture(scope="module")
def known() -> Iterator[Known]:
    with make() as llm:
        yield Known(llm)


def test_batch_of_32(known: Known) -> None:
    """Ten known prompts among twenty-two others."""
    known.llm.reset_prefix_cache()
    others = [known.llm.tokenizer.encode(text) for text in SHORT[10:]]  # type: ignore[union-attr]
    found = together(known.llm, known.prompts + others, params() + [params()[1]] * len(others))
    assert found[: len(known.prompts)] == known.answers
    assert known.llm.stats()["max_batch_size"] == 32


def test_chunks_and_prefix_hits(known: Known) -> None:
    known.llm.reset_prefix_cache()
    assert chunked(known.llm, known.prompts, params(), seed=4) == known.answers
    before = known.llm.stats()["num_cached_tokens"]
    assert together(known.llm, known.prompts, params()) == known.answers
    assert known.llm.stats()["num_cached_tokens"] > before


def test_siblings_and_guesses(known: Known) -> None:
    outputs = known.llm.generate(known.prompts[:4], [one.clone(n=3) for one in params()[:4]], use_tqdm=False)
    assert [answer(output) for output in outputs] == known.answers[:4]
    assert drafted(known.llm, known.prompts, params(), known.answers) == known.answers
    assert drafted(known.llm, known.prompts, params(), known.answers, Branching) == known.answers


@pytest.mark.parametrize("block_size", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_preempted_with_other_blocks(known: Known, block_size: int) -> None:
    with make(block_size=block_size, kv_cache_tokens=512, scheduling_policy="priority", max_num_seqs=3) as small:
        assert displaced(small, known.prompts, params()) == known.answers
        assert small.stats()["num_preemptions"] > 0
