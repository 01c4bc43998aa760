"""Adapters, against transformers with them merged into the weights; alone and in company."""

from __future__ import annotations

import copy
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock import LoRARequest, SamplingParams
from tests.gpu.answers import prompts
from tests.gpu.check import Figures, check, require
from tests.gpu.models import DEVICE, engine, log_probabilities, made
from tests.lora import adapters

RANKS, ALPHA = (4, 16, 7), 16
_FOLDERS = tempfile.TemporaryDirectory(prefix="penstock-adapters-")
# The least share of the oracle's own choices.
LEAST = {"float32": 0.97, "bfloat16": 0.75}


@lru_cache(maxsize=1)
def _adapted() -> tuple[list[LoRARequest], list[Any]]:
    """Adapters of the small Llama, and its model with each merged."""
    model, requests, merged = copy.deepcopy(made("LlamaForCausalLM").model).cpu(), [], []
    for seed, rank in enumerate(RANKS):
        pairs = adapters.make_pairs(model, rank, seed, size=0.2)
        folder = adapters.write(Path(_FOLDERS.name) / str(seed), model, pairs, alpha=ALPHA)
        requests.append(LoRARequest(f"adapter-{seed}", seed + 1, str(folder)))
        merged.append(adapters.merge(model, pairs, adapters.scale_of(ALPHA, rank)))
    return requests, merged


@check([(dtype, way) for dtype in LEAST for way in ("recorded", "eager", "deterministic")])
def adapters_like_merged_weights(dtype: str, way: str) -> Figures:
    """Three adapters in two slots, and rows without one, in the same steps."""
    one, (requests, merged) = made("LlamaForCausalLM"), _adapted()
    given = prompts(1, 60, 9, 33, 100, 7, 20, 2)
    each = [[None, *requests][i % 4] for i in range(len(given))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {"enforce_eager": way == "eager", "deterministic": way == "deterministic"}
    with engine(one.folder, dtype=dtype, enable_lora=True, max_loras=2, max_cpu_loras=3, **options) as llm:
        outputs = llm.generate(given, params, lora_request=each, use_tqdm=False)
        plain = llm.generate(given, params, use_tqdm=False)
        alone = [llm.generate([given[i]], params, lora_request=[each[i]], use_tqdm=False)[0] for i in (1, 4)]
    chosen = total = changed = 0
    for prompt, lora, output, bare in zip(given, each, outputs, plain):
        require(output.error is None, f"a request failed: {output.error}")
        answer = list(output.outputs[0].token_ids)
        oracle = one.model if lora is None else merged[lora.lora_int_id - 1]
        expected = log_probabilities(oracle.to(DEVICE), (prompt + answer)[:-1]).argmax(-1)
        chosen += int((expected[len(prompt) - 1 :].cpu() == output_ids(answer)).sum())
        total += len(answer)
        changed += answer != list(bare.outputs[0].token_ids)
    figures: Figures = {"own choice": f"{chosen}/{total}", "changed": changed}
    require(chosen >= LEAST[dtype] * total and changed >= 3, f"far from merged weights: {figures}")
    same = [tuple(a.outputs[0].token_ids) == tuple(outputs[i].outputs[0].token_ids) for a, i in zip(alone, (1, 4))]
    require(way != "deterministic" or all(same), "another answer alone")
    return figures


def output_ids(answer: list[int]) -> Any:
    import torch

    return torch.tensor(answer)
