"""Bitwise equal answers on tiny models of several families, whatever road is taken.

A matmul whose order of sums depends on the number of rows, an attention that splits by block size, a draw that uses
the batch's position: each fails here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidConfig
from penstock.passes.lower import LoweredBlock
from tests.same_tokens.handover import compute_prompt, open_pair
from tests.same_tokens.roads import (
    Answer,
    Branching,
    alone,
    always,
    answer,
    chunked,
    displaced,
    drafted,
    shuffled,
    tiny_llm,
    tiny_model,
    together,
)

FAMILIES = [
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "Mamba2ForCausalLM",
    "Gemma3ForCausalLM",
    "GPT2LMHeadModel",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "DeepseekV2ForCausalLM",
    "Llama4ForCausalLM",
]
ALIKE = [
    "Qwen2MoeForCausalLM",
    "MistralForCausalLM",
    "Gemma2ForCausalLM",
    "GPTNeoXForCausalLM",
    "Qwen3ForCausalLM",
    "Olmo2ForCausalLM",
    "Cohere2ForCausalLM",
    "SmolLM3ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "GraniteMoeForCausalLM",
    "PhimoeForCausalLM",
    "Glm4MoeForCausalLM",
]
NUM_PROMPTS, NUM_TOKENS, VOCABULARY = 32, 20, 64
RESTORED = 16  # prompts


def prompts() -> list[list[int]]:
    """Of 1 to 60 tokens, some sharing a beginning."""
    rng = random.Random(5)
    common = [rng.randrange(3, VOCABULARY) for _ in range(40)]
    return [
        common[: rng.choice((0, 0, 17, 40))] + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 20))]
        for _ in range(NUM_PROMPTS)
    ]


def params() -> list[SamplingParams]:
    """Greedy and sampled in turn, with filters and penalties."""
    kinds: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=1.0, seed=7),
        dict(temperature=0.8, top_p=0.9, seed=8),
        dict(temperature=1.2, top_k=9, min_p=0.02, repetition_penalty=1.2, seed=9),
    ]
    common: dict[str, Any] = dict(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, detokenize=False)
    return [SamplingParams(**common, **kinds[i % len(kinds)]) for i in range(NUM_PROMPTS)]


class Known:
    """A model and the answers its prompts get alone."""

    def __init__(self, model: str, **options: Any) -> None:
        self.model = model
        self.options = options
        self.llm: LLM = self.make()
        self.answers: list[Answer] = alone(self.llm, prompts(), params())

    def make(self, **options: Any) -> LLM:
        return tiny_llm(self.model, **self.options, **options)


@pytest.fixture(
    scope="module",
    params=[
        *((name, "auto") for name in FAMILIES),
        ("Gemma3ForCausalLM", "int8"),
        ("Qwen3ForCausalLM", "int4"),
        ("Gemma3ForCausalLM", "int4", "sliding_window"),
        *(pytest.param((name, "auto"), marks=pytest.mark.slow) for name in ALIKE),
    ],
    ids=lambda param: param[0] if param[1] == "auto" else "-".join(param),
)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    name, kept, *skipped = request.param
    skips = {"kv_cache_dtype_skip_layers": skipped[0]} if skipped else {}
    known = Known(tiny_model(tmp_path_factory.mktemp(name), name), kv_cache_dtype=kept, **skips)
    yield known
    known.llm.close()


def test_answers_vary(known: Known) -> None:
    """Else the comparisons below would prove nothing."""
    assert len({tokens for tokens, _ in known.answers}) > NUM_PROMPTS // 2


def test_batch_of_32(known: Known) -> None:
    known.llm.reset_prefix_cache()
    assert together(known.llm, prompts(), params()) == known.answers
    assert known.llm.stats()["max_batch_size"] >= 20


def test_any_order(known: Known) -> None:
    known.llm.reset_prefix_cache()
    assert shuffled(known.llm, prompts(), params(), seed=1) == known.answers


def test_random_chunks(known: Known) -> None:
    known.llm.reset_prefix_cache()
    assert chunked(known.llm, prompts(), params(), seed=2) == known.answers


def test_prefix_hits(known: Known) -> None:
    known.llm.reset_prefix_cache()
    together(known.llm, prompts(), params())
    before = known.llm.stats()["num_cached_tokens"]
    assert together(known.llm, prompts(), params()) == known.answers
    assert known.llm.stats()["num_cached_tokens"] > before + 100


def test_out_of_memory(known: Known) -> None:
    """A cache for two long sequences; where layers have windows or states of one size, more of them fit."""
    with known.make(kv_cache_tokens=192, max_model_len=96, max_num_batched_tokens=64) as small:
        assert together(small, prompts(), params()) == known.answers
        kinds = {group.spec.kind for group in small.service.engine.scheduler.cache.groups}
        assert small.stats()["num_preemptions"] > 0 or "window" in kinds or kinds == {"recurrent"}


def test_displaced(known: Known) -> None:
    """Every few steps somebody more important comes and takes a row."""
    with known.make(scheduling_policy="priority", max_num_seqs=4) as small:
        assert displaced(small, prompts(), params()) == known.answers
        assert small.stats()["num_preemptions"] > 20


@pytest.mark.parametrize("block_size", [8, 32])
def test_block_sizes(known: Known, block_size: int) -> None:
    with known.make(block_size=block_size, max_num_batched_tokens=50) as other:
        assert together(other, prompts(), params()) == known.answers


def test_without_prefix_cache(known: Known) -> None:
    with known.make(enable_prefix_caching=False, threads=1) as other:
        assert together(other, prompts(), params()) == known.answers


def test_plain_layers(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any rule of passes/lower: chunked, preempted and from the prefix cache of a small pool."""
    monkeypatch.setenv("PENSTOCK_PLAIN", "1")
    with known.make(kv_cache_tokens=320, max_model_len=96, max_num_batched_tokens=64) as plain:
        runner: Any = plain.service.engine.executor
        assert not any(isinstance(block, LoweredBlock) for block in runner.model.blocks)
        assert chunked(plain, prompts(), params(), seed=3) == known.answers


def test_siblings(known: Known) -> None:
    """The first of n equals the only one of 1; the others are the same alone and in company."""
    many = [one.clone(n=3) for one in params()]
    known.llm.reset_prefix_cache()
    outputs = known.llm.generate(prompts(), many, use_tqdm=False)
    assert [answer(output) for output in outputs] == known.answers
    for i in (1, 2):
        single = known.llm.generate(prompts()[i], many[i], use_tqdm=False)[0]
        assert [answer(single, k) for k in range(3)] == [answer(outputs[i], k) for k in range(3)]
    assert known.llm.stats()["num_copied_blocks"] > 0


def test_drafted(known: Known) -> None:
    """Guesses, right and wrong, change nothing."""
    known.llm.reset_prefix_cache()
    before = known.llm.stats()
    assert drafted(known.llm, prompts(), params(), known.answers) == known.answers
    after = known.llm.stats()
    accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    checked = after["num_draft_tokens"] - before["num_draft_tokens"]
    if known.llm.service.engine.scheduler.cache.recurrent:  # a state cannot forget a wrong guess
        assert accepted == checked == 0
    else:
        assert 0 < accepted < checked


def test_drafted_trees(known: Known) -> None:
    """Trees of guesses with the right branch first, last or in the middle: accepted paths are moved to their places."""
    known.llm.reset_prefix_cache()
    runner: Any = known.llm.service.engine.executor
    before, obstacles = known.llm.stats(), runner.tapes.obstacles
    assert drafted(known.llm, prompts(), params(), known.answers, Branching) == known.answers
    after = known.llm.stats()
    accepted, checked = (after[name] - before[name] for name in ("num_accepted_tokens", "num_draft_tokens"))
    if known.llm.service.engine.scheduler.cache.recurrent:
        assert accepted == checked == 0 and not runner.verifies_trees
    else:
        assert 100 < accepted < checked and set(runner.tapes.obstacles) == set(obstacles)


def test_speculation(known: Known) -> None:
    """With every draft verified: together, again from the prefix cache and beside earlier answers, and in chunks."""
    if known.llm.service.engine.scheduler.cache.recurrent:
        with pytest.raises(InvalidConfig, match="a recurrent state cannot go back"):
            known.make(speculative_config={"method": "auto"})
        return
    with known.make(speculative_config={"method": "auto"}) as llm:
        for _ in range(2):
            assert together(always(llm), prompts(), params()) == known.answers
        stats = llm.stats()
        assert stats["num_draft_tokens"] >= stats["num_accepted_tokens"] > 0
        assert chunked(llm, prompts(), params(), seed=4) == known.answers


def test_restored_after_a_restart(known: Known, tmp_path: Path) -> None:
    """From files that an engine of before left: together, in chunks, and in a pool that preempts."""
    few, own, answers = prompts()[:RESTORED], params()[:RESTORED], known.answers[:RESTORED]
    kept = {"kv_offloading_path": str(tmp_path), "kv_offloading_size": 0.01}
    with known.make(**kept) as first:
        assert together(first, few, own) == answers
    with known.make(**kept) as later:
        assert together(later, few, own) == answers
        assert later.stats()["num_restored_tokens"] >= 32
    with known.make(kv_cache_tokens=192, max_model_len=96, max_num_batched_tokens=64, **kept) as small:
        assert chunked(small, few, own, seed=5) == answers
        assert small.stats()["num_restored_tokens"] >= 32


def test_handed_over_by_tcp(known: Known) -> None:
    """Prompts computed by another engine, whose blocks were fetched."""
    some = slice(0, RESTORED)
    with known.make(kv_offloading_size=0.05) as prefill, known.make(kv_offloading_size=0.05) as decode:
        _, fetch = open_pair(prefill, decode)
        for prompt in prompts()[some]:
            compute_prompt(prefill, prompt)
            fetch(prompt)
        assert together(decode, prompts()[some], params()[some]) == known.answers[some]
        assert decode.stats()["num_restored_tokens"] >= 32


@pytest.mark.parametrize("overlap", [1, 2])
def test_prefixes_that_started_plans_compute(known: Known, overlap: int) -> None:
    """Whoever begins alike is admitted while the first of them is not yet accounted for."""
    with known.make() as llm:
        llm.service.engine.overlap = overlap
        assert together(llm, prompts(), params()) == known.answers
        assert llm.stats()["num_cached_tokens"] > 0
