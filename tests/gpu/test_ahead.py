"""A start with nothing in Triton's cache, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.llm.tiny import write_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 3000, "num_hidden_layers": 3,
         "max_position_embeddings": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
START = """
import sys
from triton import knobs
missed = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or missed.append(src.name)
from penstock import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=1000, gpu_memory_utilization=0.1,
          progress=False)
llm.generate([[5] * 128], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
print(" ".join(missed))
"""


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_the_first_tokens_compile_nothing(kind: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", kind, **SIZES)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PENSTOCK_COMPILERS": "4"}
    environment.pop("TRITON_INTERPRET", None)
    told = subprocess.run([sys.executable, "-c", START, folder], env=environment, capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.strip() == ""
