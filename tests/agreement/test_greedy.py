"""Greedy answers of the real models equal transformers' on the same dequantized weights.

Both sides compute in float32 but sum in different orders: two tokens whose logits are within rounding of each other
may come out either way, and the answers part there. Such a tie is the only difference allowed, and only in 2 of 32
(none of the 4 that are asked by default).
"""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from tests.agreement.reference import NUM_TOKENS, PROMPTS, first_difference, load_reference, model_path

TIE = 2e-3  # of logit; float32 rounding through 30 layers


@pytest.mark.parametrize(("step", "most"), [(16, 0), pytest.param(1, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param("smollm2", marks=pytest.mark.slow), "gemma3-270m"],  # tests/quality compares smollm2's perplexity
)
def test_greedy_agrees_with_transformers(name: str, step: int, most: int) -> None:
    path, prompts = model_path(name), PROMPTS[::step]
    with LLM(str(path), progress=False, max_model_len=512, activation_dtype="float32", kv_cache_dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    reference = load_reference(path)
    differences = {}
    for output in outputs:
        answer = output.outputs[0].token_ids
        assert len(answer) == NUM_TOKENS
        found = first_difference(reference, output.prompt_token_ids, answer)
        if found:
            differences[output.prompt] = found
    print(f"{name}: {len(prompts) - len(differences)} of {len(prompts)} equal; parted at {differences}")
    assert len(differences) <= most
    assert all(gap < TIE for _, gap in differences.values())


def _prompt_logprobs(path: str, texts: list[str], kv_cache_dtype: str) -> list[float]:
    with LLM(path, progress=False, max_model_len=512, activation_dtype="float32", kv_cache_dtype=kv_cache_dtype) as llm:
        outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return [
        one.logprob
        for output in outputs
        for position in output.prompt_logprobs or []
        if position
        for one in position.values()
    ]


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("smollm2", {"float16": (0.03, 0.002), "bfloat16": (0.2, 0.02), "int8": (1.5, 0.1)}),
        ("gemma3-270m", {"float16": (0.03, 0.002), "bfloat16": (0.2, 0.02), "int8": (3.0, 0.25)}),
    ],
)
@pytest.mark.slow
def test_how_near_smaller_caches_are(name: str, bounds: dict[str, tuple[float, float]]) -> None:
    """What a token's log probability differs by from that over float32 keys and values, at most and on average."""
    path, texts = str(model_path(name)), [" ".join(PROMPTS[i : i + 8]) for i in range(0, 32, 8)]
    wanted = _prompt_logprobs(path, texts, "float32")
    for dtype, (most, mean) in bounds.items():
        found = [abs(a - b) for a, b in zip(_prompt_logprobs(path, texts, dtype), wanted, strict=True)]
        print(f"{name} {dtype}: largest difference {max(found):.2g}, mean {sum(found) / len(found):.2g}")
        assert 0 < max(found) < most and sum(found) / len(found) < mean
