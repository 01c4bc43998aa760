"""Every kernel compiles for the GPUs that are supported, whether or not there is one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

KERNELS = (
    "_activation",
    "_add",
    "_block_move",
    "_cache_write",
    "_chain_gemm",
    "_combine",
    "_decode",
    "_decode_inputs",
    "_dequantize_rows",
    "_draw",
    "_encoder_attention",
    "_exact_attention",
    "_exact_latents",
    "_expand",
    "_finish",
    "_fused_decode",
    "_gemv",
    "_grouped_gemm",
    "_grouped_gemv",
    "_grouped_int_gemm",
    "_head_product",
    "_int_epilogue",
    "_int_dots",
    "_int_gemm",
    "run_int_gemv",
    "_latent_attention",
    "_latent_write",
    "_layer_norm",
    "_pooling",
    "_prefill",
    "_qkv_write",
    "_quantize_inputs",
    "_reduce_logprobs",
    "_reduce_tiles",
    "_report",
    "_rms_norm",
    "_rope",
    "_route",
    "_scale",
    "_shared_prefix",
    "_shrink",
    "_skinny_gemm",
    "_softcap",
    "_sort_pairs",
    "cut",
    "cut_sums",
    "merge_in_order",
    "merge_splits",
)
FP8_KERNELS = (  # not for Ampere
    "_fp8_epilogue",
    "_group_gemm",
    "_group_gemv",
    "_grouped_group_gemm",
    "_quantize_rows",
    "_widen_groups",
)
HOPPER_KERNELS = ("_prefill_hopper",)
SAMPLER_KERNELS = (  # of rare samplers, compiled with all variants
    "apply_dry",
    "apply_top_n_sigma",
    "apply_xtc",
    "find_xtc_tokens",
    "measure_entropy",
    "measure_moments",
    "set_dynamic_temperature",
    "set_mirostat_cut",
    "update_samplers",
)


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(
    ("capability", "variants"),
    [(90, "once"), *(pytest.param(capability, "all", marks=pytest.mark.slow) for capability in (80, 89, 90))],
)
def test_kernels_compile(capability: int, variants: str, tmp_path: Path) -> None:
    """Ampere, Ada and Hopper; the interpreter accepts much that a compiler does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.compile_kernels", str(capability), variants]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert told.returncode == 0, told.stderr[-3000:]
    expected = {*KERNELS, *(FP8_KERNELS if capability >= 89 else ()), *(HOPPER_KERNELS if capability == 90 else ())}
    assert set(told.stdout.split()) == expected | set(SAMPLER_KERNELS if variants == "all" else ())


def test_no_kernel_has_a_text_for_a_default() -> None:
    """Triton 3.6 does not compile that, and later ones do."""
    for path in (Path(__file__).parents[2] / "penstock" / "ops" / "triton").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
                texts = [one for one in node.args.defaults if isinstance(one, ast.Constant) and type(one.value) is str]
                assert not texts, f"{path.name}: {node.name} has a text for a default: have callers pass it"
