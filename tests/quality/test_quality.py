"""What speed may cost: the engine as it runs by default, against the same weights computed in float32 throughout.

`pytest -s` shows the figures. FLOAT_PERPLEXITY is transformers' on the dequantized weights, so that both cannot drift.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.api.perplexity import Score, perplexity
from tests.agreement.reference import model_path
from tests.quality.text import TEXT

FLOAT = {"dtype": "float32", "kv_cache_dtype": "float32"}
INTEGER = {"activation_dtype": "int8"}
FLOAT_PERPLEXITY = {2000: 24.37423, 20000: 25.54343}


def smollm2(options: dict[str, str]) -> LLM:
    return LLM(str(model_path("smollm2")), progress=False, **options)


def teacher_forced(integer: bool) -> tuple[list[float], list[int]]:
    """Of 2,000 tokens of the text the loss, and which token the model held for the likeliest in its place."""
    losses, likeliest = [], []
    with smollm2(INTEGER if integer else FLOAT) as llm:
        assert llm.tokenizer is not None
        tokens = llm.tokenizer.encode(TEXT)
        prompts = [tokens[begin : begin + 1001] for begin in (0, 1000)]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
        for output in llm.generate(prompts, params, use_tqdm=False):
            positions: list[Any] = (output.prompt_logprobs or [])[1:]
            losses += [-next(iter(position.values())).logprob for position in positions]
            likeliest += [id for position in positions for id, found in position.items() if found.rank == 1]
    assert len(losses) == len(likeliest) == 2000
    return losses, likeliest


def of_the_whole(options: dict[str, str]) -> Score:
    with smollm2(options) as llm:
        return perplexity(llm, TEXT, window=1024, stride=960, max_tokens=20001)


def of(losses: list[float]) -> float:
    return math.exp(math.fsum(losses) / len(losses))


def test_integer_activations_on_2000_tokens() -> None:
    exact, likeliest = teacher_forced(integer=False)
    assert of(exact) == pytest.approx(FLOAT_PERPLEXITY[2000], rel=1e-4)
    losses, chosen = teacher_forced(integer=True)
    ratio = of(losses) / of(exact)
    agreement = sum(a == b for a, b in zip(likeliest, chosen)) / len(chosen)
    print(
        f"\n2000 tokens: float32 {of(exact):.5f}, int8 {of(losses):.5f}, ratio {ratio:.5f}, "
        f"same likeliest token {agreement:.2%}"
    )
    assert losses != exact  # another path, not the same one twice
    assert ratio == pytest.approx(1, abs=0.005)
    assert agreement >= 0.97


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_integer_activations_on_20000_tokens() -> None:
    exact, integer = of_the_whole(FLOAT), of_the_whole(INTEGER)
    assert len(exact.losses) == len(integer.losses) == 20000
    ratio = integer.perplexity / exact.perplexity
    print(
        f"\n20000 tokens: float32 {exact.perplexity:.5f} ± {exact.standard_error:.5f}, "
        f"int8 {integer.perplexity:.5f}, ratio {ratio:.5f}"
    )
    assert exact.perplexity == pytest.approx(FLOAT_PERPLEXITY[20000], rel=1e-4)
    assert ratio == pytest.approx(1, abs=0.005)
