"""Every family with adapters on all its linears, its embedding and its head, against transformers with merged weights;
rows with several adapters, with sums and with none in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, LoRARequest, SamplingParams
from penstock.models.spec import FAMILIES
from tests.lora import adapters
from tests.models import oracle

PROMPT = [3, 5, 7, 11, 13, 2, 9, 17, 4, 6]
RANKS = {"one": 4, "two": 17}
ALPHA = 8
CASES = [pytest.param(name, family.like[0], id=name) for name, family in FAMILIES.items() if name != "BertModel"]


@pytest.mark.parametrize(("architecture", "like"), CASES)
def test_equals_merged_weights(architecture: str, like: dict[str, Any], tmp_path: Path) -> None:
    theirs = oracle.make(architecture, like)
    base = oracle.save(theirs, tmp_path / "base")
    pairs = {name: adapters.make_pairs(theirs, rank, seed) for seed, (name, rank) in enumerate(RANKS.items())}
    loras = {
        name: LoRARequest(name, index + 1, str(adapters.write(tmp_path / name, theirs, pairs[name], ALPHA)))
        for index, name in enumerate(RANKS)
    }
    with LLM(
        str(base), dtype="float32", kv_cache_dtype="float32", skip_tokenizer_init=True, enable_lora=True,
        max_lora_rank=32, progress=False, max_model_len=64, device="cpu",
    ) as llm:  # fmt: skip
        oracle.resolve_rope(theirs, 64)
        asked: list[Any] = [
            None,
            loras["one"],
            loras["two"],
            [loras["one"], LoRARequest("two", 2, loras["two"].lora_path, -0.5)],
        ]
        params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0)
        outputs = llm.generate([PROMPT] * 4, params, lora_request=asked, use_tqdm=False)
    one, two = (adapters.scale_of(ALPHA, rank) for rank in RANKS.values())
    merged = [
        theirs,
        adapters.merge(theirs, pairs["one"], one),
        adapters.merge(theirs, pairs["two"], two),
        adapters.merge(adapters.merge(theirs, pairs["one"], one), pairs["two"], -0.5 * two),
    ]
    found = []
    for model, output in zip(merged, outputs):
        expected = oracle.logits(model, PROMPT + list(output.outputs[0].token_ids)).log_softmax(-1)
        got = torch.tensor([next(iter(each.values())).logprob for each in (output.prompt_logprobs or [])[1:] if each])
        wanted = expected[range(len(PROMPT) - 1), PROMPT[1:]]
        assert (got - wanted).abs().max() <= 2e-4 * expected.abs().max()
        assert expected[len(PROMPT) - 1 : -1].argmax(-1).tolist() == list(output.outputs[0].token_ids)
        found.append(got)
    assert min((a - b).abs().max() for i, a in enumerate(found) for b in found[:i]) > 0.01, "adapters change nothing"
