"""Kernels compiled ahead are those that an engine asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.llm.tiny import write_config
from tests.models.oracle import make, save
from tests.quant import other_writers as others
from tests.quant import writers
from tests.quant.test_folders import LIKE

ROOT = Path(__file__).parents[2]
KINDS = {
    "LlamaForCausalLM": {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "Qwen3MoeForCausalLM": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "GptOssForCausalLM": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "DeepseekV3ForCausalLM": {"hidden_size": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "head_dim": 32},
    "Qwen3ForCausalLM": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {}),
    ("Qwen3ForCausalLM", {}),
    ("LlamaForCausalLM", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ("LlamaForCausalLM", {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": "0,2"}),
    ("Qwen3ForCausalLM", {"quantization": "int4"}),
    ("LlamaForCausalLM", {"deterministic": True, "quantization": "fp8"}),
    ("LlamaForCausalLM", {"enable_lora": True}),
    ("Qwen3MoeForCausalLM", {}),
    ("Qwen3MoeForCausalLM", {"cpu_offload_gb": 0.001}),  # some weights of layers that are otherwise alike
    ("GptOssForCausalLM", {"quantization": "fp8"}),
    ("DeepseekV3ForCausalLM", {}),
    ("DeepseekV3ForCausalLM", {"deterministic": True, "quantization": "fp8"}),
]
SIZES = {"intermediate_size": 1024, "vocab_size": 3000, "num_hidden_layers": 3, "max_position_embeddings": 2048}

pytestmark = pytest.mark.skipif(find_spec("triton") is None or sys.platform != "linux", reason="no Triton")


def run(work: str, folder: str, cache: Path, **options: Any) -> str:
    """In a process where Triton compiles; here it may have been told to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PENSTOCK_COMPILERS": "2"}
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.runner.compiling", work, folder, json.dumps(options)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    return told.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_an_engine_finds_all_its_kernels(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Prompts, single tokens in many numbers, a prefix in common: none of it compiles anything."""
    folder = write_config(tmp_path / "model", kind, **KINDS[kind], **SIZES)
    run("ahead", folder, tmp_path / "cache", **options)
    assert run("engine", folder, tmp_path / "cache", **options) == ""
    if kind in ("LlamaForCausalLM", "Qwen3ForCausalLM") and not options:
        lost = {"_prefill", "_prefill_hopper"} if kind == "Qwen3ForCausalLM" else {"_prefill"}  # heads of 128
        for name in lost:
            (next((tmp_path / "cache").glob(f"*/{name}.json")).parent / f"__grp__{name}.json").unlink()
        assert set(run("engine", folder, tmp_path / "cache").split()) == lost  # by one thread or several


def test_kernels_are_noted_without_torchs_compiler(tmp_path: Path) -> None:
    """And they are the ones that torch's own functions of the meta device lead to."""
    folder = write_config(tmp_path / "model", "Qwen3ForCausalLM", **KINDS["Qwen3ForCausalLM"], **SIZES)
    run("notes", folder, tmp_path / "cache")


@pytest.mark.parametrize(
    ("method", "options", "kernels"),
    [
        (others.gptq(4, 32), {"deterministic": True}, {"_int_gemm", "_dequantize_rows", "_chain_gemm"}),
        (others.fp8("block"), {}, {"_group_gemm", "_group_gemv", "_widen_groups"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (others.gptq(4, 32), {}, {"_int_gemm", "_int_gemv", "_dequantize_rows"}),
                (others.fp8("block"), {"deterministic": True}, {"_group_gemm", "_widen_groups", "_chain_gemm"}),
                (others.fp8("tensor"), {}, {"_fp8_epilogue", "_quantize_rows"}),
            )
        ),
    ],
)
def test_kernels_are_those_of_the_folders_storage(
    method: writers.Method, options: dict[str, Any], kernels: set[str], tmp_path: Path
) -> None:
    """By its headers alone, though the outline has no weights."""
    plain = save(make("LlamaForCausalLM", LIKE), tmp_path / "plain")
    writers.quantize_folder(plain, tmp_path / "model", method)
    found = set(run("quantized", str(tmp_path / "model"), tmp_path / "cache", max_model_len=128, **options).split())
    assert kernels <= found, found
    assert "_skinny_gemm" not in found


def test_trouble_ahead_keeps_nobody(tmp_path: Path) -> None:
    run("trouble", str(tmp_path), tmp_path / "cache")


def test_how_many_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.runner.compile.ahead import num_processes

    monkeypatch.delenv("PENSTOCK_COMPILERS", raising=False)
    assert [num_processes(cores) for cores in (1, 3, 4, 16, 64)] == [0, 0, 2, 8, 8]
    monkeypatch.setenv("PENSTOCK_COMPILERS", "0")
    assert num_processes(16) == 0


def test_compile_ahead_brings_the_bodies() -> None:
    """Without them a coordinator would run references, and compile nothing."""
    code = (
        "import penstock.runner.compile.ahead\n"
        "from penstock.ops import OPS\n"
        "assert 'cuda' in OPS['sample'].bodies and 'cuda' in OPS['product'].bodies"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
