"""Memory that one engine may have, under the heaviest load that it admits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from penstock import LLM, SamplingParams
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.draft_models import draft_always
from tests.gpu.models import DEVICE
from tests.llm.tiny import write_config

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SHARE = 0.08
NUM_PROMPTS, LENGTH, OUTPUT = 270, 300, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4"},
    "offloaded": {"cpu_offload_gb": 1.0},
    "with draft models": {},  # the model itself, for as many rows as it may
}


def _row_params(number: int) -> SamplingParams:
    """All there is to wish; some of it is rare, as it takes the host long."""
    extra: dict[str, Any] = {}
    if number == 0:
        extra = {"prompt_logprobs": 5}
    elif number == 1:
        extra = {"logprobs": 40, "typical_p": 0.9}
    elif number % 3 == 0:
        extra = {"n": 2}
    given: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logprobs": 20,
        "ignore_eos": True,
        "max_tokens": OUTPUT,
        "logit_bias": {7: 1.0},
    }
    return SamplingParams(**given | extra)


PLAIN = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=OUTPUT)


@check([(what,) for what in OPTIONS])
def no_load_runs_out_of_memory(what: str) -> Figures:
    """With no more than its share to be had from torch: full steps, all rows, cache and all row_params at once."""
    if DEVICE == "cpu":
        raise Skip("it is about a GPU's memory")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(min(1.0, SHARE + before / total))
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-memory-") as place:
            folder = write_config(Path(place), "Qwen3ForCausalLM", **SIZES)
            drafts = what == "with draft models"
            with LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                progress=False,
                device=DEVICE,
                max_model_len=4096,
                gpu_memory_utilization=SHARE,
                max_num_seqs=256,
                threads=2,
                **OPTIONS[what] | ({"speculative_config": {"model": folder}} if drafts else {}),
            ) as llm:
                if drafts:
                    draft_always(llm)
                prompts = [
                    [(31 * number + 7 * at) % 150000 for at in range(LENGTH + number)] for number in range(NUM_PROMPTS)
                ]
                params = [_row_params(number) for number in range(NUM_PROMPTS)]
                if drafts:  # rows with penalties get none
                    params[1::2] = [PLAIN] * len(params[1::2])
                outputs = llm.generate(prompts, params, use_tqdm=False)
                stats = llm.stats()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    reasons = {one.finish_reason for output in outputs for one in output.outputs}
    require(reasons == {"length"}, f"answers ended by {sorted(map(str, reasons))}")
    require(not stats["num_failed_steps"], f"{stats['num_failed_steps']} steps failed")
    most = (torch.cuda.max_memory_reserved() - before) / total
    require(most <= SHARE, f"{most:.4f} of the memory was taken, and {SHARE} is its share")
    return {"share taken": most, "rows at once": stats["max_batch_size"], "preempted": stats["num_preemptions"]}
