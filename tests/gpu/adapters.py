"""Adapters, against transformers with them merged into the weights; alone and in company."""

from __future__ import annotations

import copy
import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock import LoRARequest, SamplingParams
from tests.gpu.answers import prompts
from tests.gpu.check import Figures, check, require
from tests.gpu.experts import BOUNDS, told
from tests.gpu.models import DEVICE, engine, log_probabilities, made
from tests.lora import adapters
from tests.lora.adapters import write_for_spec

RANKS, ALPHA = (4, 16, 7), 16
_FOLDERS = tempfile.TemporaryDirectory(prefix="penstock-adapters-")
# The least share of the oracle's own choices.
LEAST = {"float32": 0.97, "bfloat16": 0.75}
LEAST_BOUND = 0.1  # of mean differences of log probabilities between bfloat16 and float32


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


@check(
    [
        (name, kind)
        for name in ("LlamaForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV2ForCausalLM")
        for kind in (None, *BOUNDS)
        if DEVICE != "cpu" or kind != "fp8"
    ]
)
def adapters_on_other_bases(architecture: str, kind: str | None) -> Figures:
    """Experts with adapters on what every token goes through, latents, and quantized bases: one adapter, none and a sum
    in the same steps, near a CPU in float32."""
    one, given = made(architecture), prompts(90, 60, 170)
    described = json.loads((one.folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_for_spec(Path(folder) / str(i), described, seed=i, size=0.5) for i in (1, 2)]
        loras = [LoRARequest(str(i), i, str(path)) for i, path in enumerate(paths, 1)]
        each: list[Any] = [loras[0], None, loras]
        found = []
        for device, dtype, quantization in (("cpu", "float32", None), (DEVICE, "bfloat16", kind)):
            options: dict[str, Any] = {"device": device, "dtype": dtype, "quantization": quantization}
            with engine(one.folder, enable_lora=True, max_loras=2, **options) as llm:
                params = SamplingParams(
                    temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True, detokenize=False
                )
                asked = [llm.generate(given, params, lora_request=wanted, use_tqdm=False) for wanted in (each, None)]
                found.append([told(outputs) for outputs in asked])
    (expected, without), (mine, _) = found
    apart, effect = (sum(abs(a - b) for a, b in zip(expected, other)) / len(expected) for other in (mine, without))
    bound = max(BOUNDS.get(kind or "", 0.0), LEAST_BOUND)
    require(len(expected) > 300 and apart <= bound < effect, f"{apart:.3g} apart, {effect:.3g} by the adapters")
    return {"mean |Δ|": apart, "by adapters": effect}


def output_ids(answer: list[int]) -> Any:
    import torch

    return torch.tensor(answer)
