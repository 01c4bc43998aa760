"""Perplexity of the default model equals transformers' on the same dequantized weights."""

from __future__ import annotations

import pytest
import torch

from penstock import LLM
from penstock.api.perplexity import perplexity
from tests.agreement.reference import load_reference, model_path
from tests.quality.text import TEXT

NUM_TOKENS, WINDOW, STRIDE = 320, 128, 64


@pytest.mark.slow  # tests/quality compares with transformers' figure by default
@torch.inference_mode()
def test_losses_are_those_of_transformers() -> None:
    path = model_path("smollm2")
    with LLM(str(path), progress=False, dtype="float32", kv_cache_dtype="float32") as llm:
        assert llm.tokenizer is not None
        tokens = llm.tokenizer.encode(TEXT)[:NUM_TOKENS]
        ours = perplexity(llm, TEXT, window=WINDOW, stride=STRIDE, max_tokens=NUM_TOKENS)
    reference, theirs = load_reference(path), []
    for begin in range(0, NUM_TOKENS - WINDOW + 1, STRIDE):
        window = torch.tensor(tokens[begin : begin + WINDOW])
        rows = reference(window[None]).logits[0].float().log_softmax(-1)
        losses = (-rows[:-1].gather(1, window[1:, None])[:, 0]).tolist()
        theirs += losses if begin == 0 else losses[-STRIDE:]
    assert len(theirs) == NUM_TOKENS - 1
    assert ours.losses == pytest.approx(theirs, abs=2e-3)
    assert ours.nats_per_token == pytest.approx(sum(theirs) / len(theirs), abs=2e-5)
