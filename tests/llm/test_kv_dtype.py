"""Keys and values are stored as an explicit dtype says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.api.assemble import bytes_per_token
from penstock.config import EngineConfig
from penstock.models.spec import FAMILIES, spec_from_config
from tests.llm import tiny
from tests.models import oracle

PROMPT = [(7 * at * at + 3 * at + 1) % 256 for at in range(40)]


def test_float32_is_float32_throughout(checkpoint: tuple[str, Any]) -> None:
    """With keys in 16 bits the largest difference from transformers is 0.0012 here."""
    folder, theirs = checkpoint
    with LLM(folder, progress=False, threads=1, dtype="float32", kv_cache_tokens=256) as model:
        chosen = {setting.name: (setting.value, setting.why) for setting in model.settings}
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True)
        answer = model.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert chosen["kv_cache_dtype"] == ("float32", "as dtype says")
    rows = oracle.logits(theirs, PROMPT + answer.token_ids)[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert rows.argmax(-1).tolist() == answer.token_ids
    assert answer.logprobs is not None
    found = torch.tensor([place[token].logprob for place, token in zip(answer.logprobs, answer.token_ids)])
    assert (found - rows.max(-1).values).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("dtype", "kept"), [("auto", "float16"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")]
)
def test_memory_is_planned_for_what_is_stored(config_folder: str, dtype: str, kept: str) -> None:
    like = {"architectures": ["LlamaForCausalLM"], **FAMILIES["LlamaForCausalLM"].like[0]}
    spec = spec_from_config(like)
    assert bytes_per_token(spec, EngineConfig(dtype=dtype)) == bytes_per_token(spec, EngineConfig(kv_cache_dtype=kept))
    with tiny.dummy(config_folder, dtype=dtype) as model:
        assert tiny.runner(model.service).memory.dtype == getattr(torch, kept)
