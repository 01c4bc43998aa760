"""Log probabilities against those that transformers' logits give; keys and values are float32 on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.types import Logprob
from tests.models import oracle

PROMPTS = [[5, 17, 200, 31, 8, 99, 150], [7], list(range(40, 90))]


def expected(theirs: Any, tokens: list[int]) -> torch.Tensor:
    """[L, V]: the distribution after each position."""
    return oracle.logits(theirs, tokens).log_softmax(-1)


def check(position: dict[int, Logprob], row: torch.Tensor, token: int, num: int) -> None:
    """The token first, then the `num` likeliest in order, each with its rank."""
    order = row.argsort(descending=True).tolist()
    likeliest = order[:num]
    assert list(position) == [token, *(other for other in likeliest if other != token)]
    for id, found in position.items():
        assert found.logprob == pytest.approx(float(row[id]), abs=2e-4)
        assert found.rank == 1 + order.index(id)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_of_the_answer(real: LLM, theirs: Any, temperature: float) -> None:
    """The raw distribution: neither the temperature nor a bias or a penalty changes what is reported."""
    params = SamplingParams(
        temperature=temperature,
        max_tokens=12,
        logprobs=5,
        seed=3,
        ignore_eos=True,
        top_k=20,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={9: -2.0},
    )
    for prompt, output in zip(PROMPTS, real.generate(PROMPTS, params, use_tqdm=False)):
        answer = output.outputs[0]
        rows = expected(theirs, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) == 12
        for position, row, token in zip(answer.logprobs, rows, answer.token_ids):
            check(position, row, token, 5)
        total = sum(float(row[token]) for row, token in zip(rows, answer.token_ids))
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert answer.cumulative_logprob == sum(p[t].logprob for p, t in zip(answer.logprobs, answer.token_ids))


def test_of_the_chosen_token_alone(real: LLM) -> None:
    answer = real.generate(PROMPTS[0], SamplingParams(max_tokens=5, logprobs=0, seed=1), use_tqdm=False)[0].outputs[0]
    assert answer.logprobs is not None
    assert [list(position) for position in answer.logprobs] == [[token] for token in answer.token_ids]
    assert all(one.rank and one.rank >= 1 for position in answer.logprobs for one in position.values())


def test_none_unless_asked_for(real: LLM) -> None:
    output = real.generate(PROMPTS[0], SamplingParams(max_tokens=5), use_tqdm=False)[0]
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("num", [0, 3])
@pytest.mark.parametrize("chunk", [512, 7])
def test_of_the_prompt(checkpoint: tuple[str, Any], num: int, chunk: int) -> None:
    """Whole or chunked, and although the prefix cache holds the prompt already."""
    folder, theirs = checkpoint
    with LLM(
        folder, progress=False, threads=1, kv_cache_dtype="float32", kv_cache_tokens=1024, max_num_batched_tokens=chunk
    ) as model:
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=num)
        for _ in range(2):
            for prompt, output in zip(PROMPTS, model.generate(PROMPTS, params, use_tqdm=False)):
                assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
                assert output.prompt_logprobs[0] is None
                rows = expected(theirs, prompt)
                for position, row, token in zip(output.prompt_logprobs[1:], rows, prompt[1:]):
                    assert position is not None
                    check(position, row, token, num)
                assert output.num_cached_tokens == 0


def test_of_the_prompt_with_siblings_and_preemption(checkpoint: tuple[str, Any]) -> None:
    folder, theirs = checkpoint
    prompts = [[(i * 7 + j) % 300 for j in range(20)] for i in range(6)]
    with LLM(
        folder, progress=False, threads=1, kv_cache_dtype="float32", kv_cache_tokens=192, block_size=8, max_model_len=64
    ) as model:
        params = SamplingParams(max_tokens=30, n=2, seed=1, prompt_logprobs=1, ignore_eos=True)
        outputs = model.generate(prompts, params, use_tqdm=False)
        assert model.stats()["num_preemptions"] > 0
    for prompt, output in zip(prompts, outputs):
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
        rows = expected(theirs, prompt)
        for position, row, token in zip(output.prompt_logprobs[1:], rows, prompt[1:]):
            assert position is not None
            check(position, row, token, 1)


def test_streamed_ones_are_the_same(real: LLM) -> None:
    params = SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1, seed=9)
    whole = real.generate("the cat", params, use_tqdm=False)[0]
    deltas = list(real.stream("the cat", params))
    assert [position for delta in deltas for position in delta.logprobs] == whole.outputs[0].logprobs
    assert list(deltas[0].prompt_logprobs or ()) == whole.prompt_logprobs
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
