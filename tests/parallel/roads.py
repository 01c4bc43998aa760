"""Prompts and parameters that take every way through a step, and the answers of one process."""

from __future__ import annotations

import random
from typing import Any

from penstock import LLM, SamplingParams
from tests.same_tokens.roads import tiny_llm

COMMON = 40  # tokens that half of the prompts begin with


def prompts(num: int, vocabulary: int = 90, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    draw = lambda count: [rng.randrange(3, vocabulary) for _ in range(count)]  # noqa: E731
    common = draw(COMMON)
    return [(common if i % 2 else []) + draw(rng.choice((1, 5, 17, 70))) for i in range(num)]


def params(num: int, max_tokens: int = 16) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=1.0, seed=5),
        dict(temperature=0.8, top_p=0.9, seed=7, n=2),
        dict(temperature=0.0, repetition_penalty=1.3, prompt_logprobs=1),
    ]
    shared: dict[str, Any] = dict(logprobs=2, ignore_eos=True)
    return [SamplingParams(max_tokens=max_tokens - i % 5, **shared, **kinds[i % len(kinds)]) for i in range(num)]


def answers(llm: LLM, num: int = 8, loras: Any = None, vocabulary: int = 90) -> list[Any]:
    """Everything that comes back, to the last bit."""
    outputs = llm.generate(prompts(num, vocabulary), params(num), use_tqdm=False, lora_request=loras)
    return [(one.prompt_logprobs, [(each.token_ids, each.logprobs) for each in one.outputs]) for one in outputs]


def alone(model: str, **options: Any) -> list[Any]:
    with tiny_llm(model, **options) as llm:
        return answers(llm)
