"""The default model through the Python interface: real text, real template, real stop strings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock import LLM, SamplingParams
from penstock.hub import list_models

QUESTION = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    if not any(model.path.name.startswith("SmolLM2") for model in list_models()):
        pytest.skip("smollm2 is not on this machine; penstock pull smollm2 fetches it")
    with LLM("smollm2", progress=False, max_model_len=512) as model:
        yield model


def test_a_conversation(smollm2: LLM) -> None:
    """An answer that ends by itself; the next turn finds the first one in the cache; streaming gives the same."""
    greedy = SamplingParams(temperature=0, max_tokens=24)
    first = smollm2.chat([QUESTION], greedy, use_tqdm=False)[0]
    answer = first.outputs[0]
    assert smollm2.tokenizer is not None
    assert "Paris" in answer.text and (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.token_ids[-1] in smollm2.tokenizer.eos_token_ids and "<|im_end|>" not in answer.text
    assert "".join(delta.text for delta in smollm2.stream([QUESTION], greedy)) == answer.text
    turns = [QUESTION, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "And of Italy?"}]
    second = smollm2.chat(turns, greedy, use_tqdm=False)[0]
    assert first.prompt is not None and second.prompt is not None
    assert second.prompt.startswith(first.prompt) and "Rome" in second.outputs[0].text
    known = len(first.prompt_token_ids) + len(answer.token_ids)
    assert second.num_cached_tokens >= known - known % 16 - 16


def test_stop_string_and_raw_text(smollm2: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=16)
    whole = smollm2.generate("The capital of France is", free, use_tqdm=False)[0].outputs[0]
    assert whole.text.startswith(" Paris")
    cut = smollm2.generate("The capital of France is", free.clone(stop="aris"), use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (" P", "stop", "aris")


def test_sampling_with_siblings(smollm2: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=0.9, top_p=0.9, max_tokens=10, logprobs=1)
    answers = smollm2.generate("Once upon a time", params, use_tqdm=False)[0].outputs
    assert smollm2.tokenizer is not None and len({answer.text for answer in answers}) == 3
    for answer in answers:
        assert answer.text == smollm2.tokenizer.decode(answer.token_ids)
        assert answer.logprobs and all(
            -20 < position[token].logprob <= 0 for position, token in zip(answer.logprobs, answer.token_ids)
        )
