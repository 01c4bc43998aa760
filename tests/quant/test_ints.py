"""A GPU's integers are a CPU's: the same rounding, the same scales, the same weights in another order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import SamplingParams
from penstock.models import load
from penstock.ops.matmul.int_product import bits_of, dequantize_ints
from penstock.quant import ints
from penstock.quant.ints import Ints, quantize, round_to_ints
from penstock.quant.packed import pack
from penstock.quant.scheme import Scheme
from tests.llm import tiny
from tests.ops.check import same_bits
from tests.quant.fused import CPU, multiply

KINDS = pytest.mark.parametrize("kind", ["int8", "int4"])


def matrix(num_out: int, width: int) -> torch.Tensor:
    """Rows of zeros, of one value and of outliers among others."""
    weight = torch.randn(num_out, width, generator=torch.Generator().manual_seed(width)) * 0.02
    weight[1], weight[2], weight[3, ::7] = 0.0, 0.125, 3.0
    return weight


@KINDS
@pytest.mark.parametrize(("num_out", "width"), [(50, 256), (37, 80), (5, 33), (200, 64)])
def test_weights_are_those_of_a_cpu(kind: str, num_out: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a matrix is rounded in several parts."""
    monkeypatch.setattr(ints, "PARTS_ON_GPU", 40 * width)
    weight = matrix(num_out, width)
    ours, theirs = round_to_ints(CPU, weight, None, kind, torch.float32), pack([quantize(weight, kind)])
    assert same_bits(dequantize_ints(ours.words, ours.scales, num_out, width), theirs.unpack())
    ids = torch.tensor([num_out - 1, 0, 3])
    assert same_bits(ours.rows(ids), theirs.unpack()[ids])
    assert ours.rows(ids[:0]).shape == (0, width)


@KINDS
def test_bytes(kind: str) -> None:
    """32 values with a scale, in 4 bits with a minimum as well."""
    scheme = round_to_ints(CPU, matrix(64, 1024), torch.zeros(64), kind, torch.bfloat16)
    assert scheme.num_bytes == 64 * 1024 // 32 * {"int8": 34, "int4": 20}[kind] + 4 * 64
    assert (scheme.num_out, scheme.num_in) == (64, 1024)
    assert scheme.rows(torch.tensor([3])).dtype == torch.bfloat16


@KINDS
def test_products(kind: str) -> None:
    weight, bias = matrix(96, 160), torch.linspace(-1, 1, 96)
    scheme = round_to_ints(CPU, weight, bias, kind, torch.float32)
    meant = dequantize_ints(scheme.words, scheme.scales, 96, 160)
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1))
    residual = torch.ones(3, 96)
    torch.testing.assert_close(multiply(scheme, x, residual.clone()), x @ meant.T + bias + residual)
    gate, up = (x @ meant.T + bias).chunk(2, -1)
    torch.testing.assert_close(multiply(scheme, x, None, "silu", True), torch.nn.functional.silu(gate) * up)


@KINDS
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM"])
def test_a_model_of_them_is_the_cpus(
    architecture: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log probabilities of a prompt with weights as a GPU holds them, and as a CPU does."""
    made: dict[str, Scheme] = {}
    storage = load.storage

    def as_on_gpu(ops: Any, take: Any, options: load.Options, *rest: Any) -> Any:
        hold = storage(ops, take, replace(options, dtype=torch.float32, on_gpu=True), *rest)

        def holding(name: str, bias: torch.Tensor | None) -> Scheme:
            made[name] = hold(name, bias)
            return made[name]

        return holding

    folder, told = tiny.write_config(tmp_path, architecture), []
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for on_gpu in (False, True):
        if on_gpu:
            monkeypatch.setattr(load, "storage", as_on_gpu)
        with tiny.dummy(folder, quantization=kind, activation_dtype="float32") as model:
            found = model.generate([list(range(3, 40))], params, use_tqdm=False)[0].prompt_logprobs
            assert found is not None
            told.append([next(iter(position.values())).logprob for position in found if position])
    torch.testing.assert_close(torch.tensor(told[1]), torch.tensor(told[0]), rtol=2e-3, atol=2e-3)
    bits = {name: bits_of(scheme.words) for name, scheme in made.items() if isinstance(scheme, Ints)}
    assert bits["embedding.tokens.weight"] == 8 and bits["layers.0.mlp.down.weight"] == int(kind[3:])
