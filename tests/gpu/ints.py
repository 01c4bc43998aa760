"""Weights of integers: near transformers with the same weights, whatever the number of rows."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from penstock.ops import FORMATS, OpTable
from penstock.ops.matmul.int_product import dequantize_ints
from penstock.quant.gguf import dequantize
from penstock.quant.ints import quantize, round_to_ints
from penstock.quant.recoded import recode
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import DEVICE, engine
from tests.gpu.plain import PROMPTS, answers, nearness, plain
from tests.ops.check import same_bits
from tests.ops.examples.matmul import packed_weight
from tests.quant.fused import multiply

KINDS = ("int8", "int4")
NUM_ROWS = (1, 9, 24, 50, 100, 200)
# Of each dtype the least share of the oracle's own choices, and the most mean difference.
BOUNDS = {"float32": (0.99, 1e-4), "bfloat16": (0.95, 0.03)}


def _need() -> None:
    if DEVICE == "cpu":
        raise Skip("kernels need a GPU")


def meant(weight: torch.Tensor, kind: str) -> torch.Tensor:
    made = round_to_ints(OpTable("cuda"), weight, None, kind, torch.float32)
    return dequantize_ints(made.words, made.scales, *weight.shape)


@lru_cache(maxsize=1)
def rounded(kind: str, tied: bool) -> tuple[Path, Any]:
    """A checkpoint, and transformers' model of it with its matrices rounded as ours are."""
    one = plain("Llama", tied)
    model = copy.deepcopy(one.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied matrix once
            if parameter.ndim == 2:
                outer = "embed_tokens" in name or "lm_head" in name
                parameter.copy_(meant(parameter, "int8" if outer else kind))
    return one.folder, model


@check(
    [
        (kind, tied, dtype, way)
        for kind in KINDS
        for tied in ("tied", "untied")
        for dtype, way in (("float32", "recorded"), ("bfloat16", "eager"), ("bfloat16", "recorded"))
    ]
)
def ints_agree_with_the_same_weights(kind: str, tied: str, dtype: str, way: str) -> Figures:
    """Greedy tokens after the same beginning, and their log probabilities, over every tile of rows."""
    _need()
    folder, oracle = rounded(kind, tied == "tied")
    least, most = BOUNDS[dtype]
    worst, far = 1.0, 0.0
    with engine(
        folder, dtype=dtype, quantization=kind, enforce_eager=way == "eager", max_num_seqs=256, kv_cache_tokens=98304
    ) as llm:
        for num_rows in NUM_ROWS:
            prompts = [[(token + i) % 1000 for token in PROMPTS[i % len(PROMPTS)]] for i in range(num_rows)]
            told, plain_ones = answers(llm, prompts, logprobs=1), answers(llm, prompts)
            seen = [*range(min(6, num_rows)), *range(6, num_rows)[-3:]]
            same, _ = nearness(oracle, [prompts[i] for i in seen], [plain_ones[i] for i in seen])
            _, apart = nearness(oracle, prompts[:3], told[:3])
            worst, far = min(worst, same), max(far, apart)
            require(same >= least and apart <= most, f"{num_rows} rows: own choice {same:.3f}, mean |Δ| {apart:.3g}")
    return {"own choice": worst, "mean |Δ|": far}


@check([(kind,) for kind in KINDS])
def ints_are_rounded_as_on_a_cpu(kind: str) -> Figures:
    """Scales and codes are the same but where two ranges fit a group of 4 bits equally well."""
    _need()
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)) * 0.02
    stored = quantize(weight, kind)  # on the CPU; what its blocks mean takes no kernels of its own
    ours, theirs = (
        meant(weight.cuda(), kind).cpu(),
        torch.from_numpy(dequantize(stored.raw, stored.ggml_type, tuple(weight.shape))),
    )
    others, most = float((ours != theirs).float().mean()), float((ours - theirs).abs().max())
    require(kind != "int8" or same_bits(ours, theirs), f"{others:.2g} of all 8-bit codes differ")
    require(others < 1e-3 and most < 0.02, f"{others:.2g} of all weights differ, by up to {most:.3g}")
    return {"others": others, "most": most}


@check([(kind, num_rows) for kind in KINDS for num_rows in (1, 5, 32, 64, 128, 256, 600)])
def products_of_ints_of_the_sizes_of_a_model(kind: str, num_rows: int) -> Figures:
    _need()
    weight = torch.randn(6144, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * 0.02
    scheme, exact = round_to_ints(OpTable("cuda"), weight, None, kind, torch.bfloat16), meant(weight, kind)
    x = torch.randn(num_rows, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
    near, expected = scheme.matmul(x).float(), x.float() @ exact.T
    gate, up = expected.chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    plain_apart = float((near - expected).norm() / expected.norm())
    gated_apart = float((multiply(scheme, x, None, "silu", True).float() - gated).norm() / gated.norm())
    figures: Figures = {"apart": plain_apart, "gated": gated_apart}
    require(plain_apart < 5e-3 and gated_apart < 1e-2, f"far from the same weights: {figures}")
    return figures


@check([(name, num_rows) for name in ("Q4_0", "Q5_K", "Q6_K", "Q2_K") for num_rows in (1, 5, 64, 200)])
def products_of_codes_as_files_have_them(name: str, num_rows: int) -> Figures:
    """Recoded on the GPU: the CPU's planes, and products of them."""
    _need()
    weight = packed_weight(1, FORMATS[name], 3072, 2048)
    scheme = recode(OpTable("cuda"), [weight.to(torch.device("cuda"))], None, torch.bfloat16)
    require(scheme is not None, "the codes were not kept")
    assert scheme is not None
    exact = dequantize_ints(scheme.words, scheme.scales, 3072, 2048)
    lost = float((exact.cpu() - weight.unpack()).norm() / weight.unpack().norm())
    x = torch.randn(num_rows, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
    expected = x.float() @ exact.T
    apart = float((scheme.matmul(x).float() - expected).norm() / expected.norm())
    rows = scheme.rows(torch.tensor([3071, 0], device="cuda")).float()
    require(lost < 1e-3 and apart < 5e-3, f"far from the same weights: {lost:.2g} recoded, {apart:.2g} multiplied")
    require(same_bits(rows, exact[[3071, 0]].bfloat16().float()), "other rows than the product's")
    return {"lost": lost, "apart": apart}
