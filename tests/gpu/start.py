"""A start with nothing in Triton's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import DEVICE
from tests.llm.tiny import write_config

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 3000,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
PLACES = "4"  # that compile at once
START = """
import json, sys, time
from triton import knobs
missed = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or missed.append(src.name)
from penstock import LLM, SamplingParams
begun = time.perf_counter()
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=1000, gpu_memory_utilization=0.1,
          progress=False, device="cuda", **json.loads(sys.argv[2]))
llm.generate([[5] * 128], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
print(f"{time.perf_counter() - begun:.1f}", *missed)
"""
OPTIONS = {
    "bfloat16": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4"},
    "deterministic": {"deterministic": True},
}


@check([(kind, what) for kind in ("LlamaForCausalLM", "Qwen3ForCausalLM") for what in OPTIONS])
def first_tokens_compile_nothing(kind: str, what: str) -> Figures:
    """What they take has been compiled ahead, in other processes."""
    if DEVICE == "cpu":
        raise Skip("kernels need a GPU")
    with tempfile.TemporaryDirectory(prefix="penstock-start-", ignore_cleanup_errors=True) as place:
        folder = write_config(Path(place) / "model", kind, **SIZES)
        environment = os.environ | {"TRITON_CACHE_DIR": f"{place}/cache", "PENSTOCK_COMPILERS": PLACES}
        environment.pop("TRITON_INTERPRET", None)
        told = subprocess.run(
            [sys.executable, "-c", START, folder, json.dumps(OPTIONS[what])],
            env=environment,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
    require(told.returncode == 0, f"it ended with {told.returncode}: {told.stderr[-2000:]}")
    seconds, *missed = told.stdout.split()
    require(not missed, f"compiled by the engine itself: {' '.join(missed)}")
    return {"seconds": float(seconds)}
