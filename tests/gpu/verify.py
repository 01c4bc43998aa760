"""`penstock verify` finds nothing wrong with this device: ops, layers and prompts."""

from __future__ import annotations

from typing import Any

from penstock.api.verify.verify import verify
from tests.gpu.check import Figures, check, require
from tests.gpu.models import engine, made

CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "exact": {"dtype": "bfloat16", "deterministic": True},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}


@check([(name,) for name in CASES])
def verify_finds_nothing(name: str) -> Figures:
    with engine(made("LlamaForCausalLM").folder, **CASES[name]) as llm:
        findings = list(verify(llm))
    wrong = [f"{one.part}, {one.test}: {one.error:.3g}, limit {one.limit:g}" for one in findings if not one.is_right]
    layers = [one.error for one in findings if one.part.startswith("layer ") and one.test == "against float32"]
    require(not wrong, "; ".join(wrong))
    require(len(layers) > 1, "no layers were compared")
    return {"layer": max(layers), "parts": len(findings)}
