"""Pipeline stages give the bits of one process on every road: rows mixed up, or a token told late, would not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, BeamSearchParams, LoRARequest, SamplingParams
from penstock.engine.plan import Output, Plan
from penstock.errors import PenstockError
from tests.lora.conftest import Lab
from tests.lora.conftest import lab as lab
from tests.parallel.processes import ranks_of
from tests.parallel.roads import alone, answers, params, prompts
from tests.same_tokens.roads import always, chunked, displaced, tiny_llm, tiny_model, together

LLAMA = "LlamaForCausalLM"
BEAMS = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("stages"), LLAMA)


@pytest.fixture(scope="module")
def single(model: str) -> Iterator[LLM]:
    with tiny_llm(model) as llm:
        yield llm


@pytest.fixture(scope="module")
def staged(model: str) -> Iterator[LLM]:
    with tiny_llm(model, pipeline_parallel_size=2) as llm:
        yield llm


def test_together(single: LLM, staged: LLM) -> None:
    expected = answers(single)
    assert answers(staged) == expected
    assert answers(staged) == expected  # prefixes are cached now, in both stages


def test_both_stages_are_busy(staged: LLM) -> None:
    """A plan is under way while another is awaited, and no row is in both."""
    engine = staged.service.engine
    assert engine.overlap == 1
    counts = []

    def watch(plan: Plan) -> None:
        rows = {row.row for row in plan.rows}
        for started, _ in engine._started:
            assert not rows & {row.row for row in started.rows if row.output is Output.SAMPLE}
        counts.append(len(engine._started))

    engine.watch = watch
    answers(staged)
    assert set(counts) == {0, 1}
    assert counts.count(1) > len(counts) / 2


def test_chunked_and_displaced(single: LLM, staged: LLM) -> None:
    asked, how = prompts(8), [one.clone(n=1, prompt_logprobs=None) for one in params(8)]
    expected = together(single, asked, how)
    staged.reset_prefix_cache()
    assert chunked(staged, asked, how, seed=3) == expected
    staged.reset_prefix_cache()
    assert displaced(staged, asked, how) == expected


def test_beams(single: LLM, staged: LLM) -> None:
    found = [
        [(one.tokens, one.cum_logprob) for one in llm.beam_search([prompts(2)[1]], BEAMS)[0].sequences]
        for llm in (single, staged)
    ]
    assert found[0] == found[1]


def test_drafted_and_preempted(model: str, single: LLM) -> None:
    """Rows are given away while plans that name them are under way, and accepted drafts are told."""
    asked = [prompt[-5:] for prompt in prompts(8)]
    how = [
        SamplingParams(max_tokens=50, ignore_eos=True, logprobs=1, temperature=0.3 * (i % 2), seed=i) for i in range(8)
    ]
    expected = together(single, asked, how)
    options: dict[str, Any] = {"speculative_config": "auto", "kv_cache_tokens": 224}
    with always(tiny_llm(model, pipeline_parallel_size=2, **options)) as llm:
        assert together(llm, asked, how) == expected
        assert together(llm, asked, how) == expected  # earlier answers are drafts now
        stats = llm.stats()
        assert stats["num_preemptions"] > 0
        assert stats["num_accepted_tokens"] > 0


BOTH = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def test_tensor_parallel_stages(model: str, single: LLM) -> None:
    """Two ranks share each of two stages."""
    expected = answers(single)
    with tiny_llm(model, **BOTH) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected
        executor: Any = llm.service.engine.executor
        assert executor.runner.tapes.num_replayed > 0  # with the collectives in it


@pytest.mark.slow
def test_four_tensor_ranks(tmp_path: Path) -> None:
    """Four heads over four ranks, which share two key heads."""
    model = tiny_model(tmp_path, LLAMA)
    config = Path(model, "config.json")
    read = json.loads(config.read_text()) | {"num_attention_heads": 4, "num_key_value_heads": 2}
    config.write_text(json.dumps(read))
    expected = alone(model, threads=1)
    with tiny_llm(model, tensor_parallel_size=4, threads=1) as llm:
        assert len(ranks_of(os.getpid())) == 3
        assert answers(llm) == expected
        assert answers(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Mamba2ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, BOTH, {"tensor_parallel_size": 2}], ids=str)
def test_families(architecture: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Windows, states and experts; experts are dealt out where ranks share a stage."""
    model = tiny_model(tmp_path, architecture)
    expected = alone(model)
    with tiny_llm(model, **sizes, enable_expert_parallel="tensor_parallel_size" in sizes) as llm:
        assert answers(llm) == expected


@pytest.mark.slow
def test_three_stages_with_codes(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, LLAMA)
    config = Path(model, "config.json")
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 5'))
    options: dict[str, Any] = {"quantization": "int4", "kv_cache_dtype": "int8"}
    expected = alone(model, **options)
    with tiny_llm(model, pipeline_parallel_size=3, **options) as llm:
        assert llm.service.engine.overlap == 2
        assert answers(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
def test_layers_that_keep_their_cache_in_full(sizes: dict[str, int], model: str) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "int4", "kv_cache_dtype_skip_layers": "1"}
    expected = alone(model, **options)
    with tiny_llm(model, **sizes, **options) as llm:
        assert answers(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
def test_adapters(sizes: dict[str, int], lab: Lab) -> None:
    """Adapters are read by every rank, and one that cannot be read is refused."""
    options: dict[str, Any] = dict(enable_lora=True, max_lora_rank=64, max_model_len=256, skip_tokenizer_init=True)
    asked = [None if i == 3 else lab.lora(i % 5) for i in range(8)]
    found = []
    for given in ({}, sizes):
        with LLM(lab.base, progress=False, device="cpu", **given, **options) as llm:
            found.append(answers(llm, loras=asked, vocabulary=300))
            with pytest.raises(PenstockError, match="no folder"):
                answers(llm, loras=[LoRARequest("none", 99, "/nowhere")] * 8, vocabulary=300)
            assert answers(llm, loras=asked, vocabulary=300) == found[0]
    assert found[0] == found[1]
