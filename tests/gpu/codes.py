"""Codes of files on a GPU: products that no row changes, 8-bit floats in groups, and quantized folders as they are."""

from __future__ import annotations

import copy
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.ops import OpTable
from penstock.ops.matmul.fp8_product import widen_groups
from penstock.quant.dense import Matrix
from penstock.quant.fp8 import Fp8Groups
from penstock.quant.ints import Ints
from tests.gpu.answers import ids
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import DEVICE, Made, engine
from tests.gpu.plain import PROMPTS, answers, nearness, plain
from tests.ops.check import same_bits
from tests.ops.examples.matmul import fp8_groups, int_weight
from tests.quant import other_writers as others
from tests.quant import writers

COUNTS = (1, 2, 16, 17, 33, 64, 65, 128, 129, 300, 512, 600)
SHAPES = ((1024, 4096), (4096, 6144))  # inputs and outputs
FOLDERS = {
    "gptq": others.gptq(4, 128, symmetric=False),
    "hqq": others.hqq(4, 64),
    "nvfp4": others.nvfp4(),
    "fp8-row": others.fp8("row"),
    "fp8-block": others.fp8("block", 128),
}
BOUNDS = {"fp8-row": (0.75, 0.04)}  # rows are rounded too; others are near in bfloat16
_FOLDERS = tempfile.TemporaryDirectory(prefix="penstock-codes-")


def _need(fp8: bool = False) -> None:
    if DEVICE == "cpu" or fp8 and torch.cuda.get_device_capability() < (8, 9):
        raise Skip("no GPU with 8-bit floats" if fp8 else "kernels need a GPU")


def _rows(num_rows: int, width: int) -> Tensor:
    return torch.randn(num_rows, width, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2)).bfloat16()


def _ints(bits: int, sets: int, width: int, num_out: int, exact: bool) -> Ints:
    words, scales = (each.to(DEVICE) for each in int_weight(1, bits, num_out, width, sets))
    return Ints(OpTable("cuda", exact), (num_out, width), words, scales, None, torch.bfloat16)


def _floats(group: int, width: int, num_out: int, exact: bool) -> Fp8Groups:
    codes, scale = (each.to(DEVICE) for each in fp8_groups(1, num_out, width, group))
    return Fp8Groups(OpTable("cuda", exact), codes, scale, group)


def _require_no_company(scheme: Any, width: int) -> Figures:
    """Rows get the same bits in any number."""
    x = _rows(COUNTS[-1], width)
    whole = scheme.matmul(x)
    differ = [count for count in COUNTS if not same_bits(scheme.matmul(x[-count:]).cpu(), whole[-count:].cpu())]
    require(not differ, f"of {differ} rows other bits than of {COUNTS[-1]}")
    return {"same": len(COUNTS)}


@check([(bits, sets, *shape) for bits, sets in ((8, 0), (8, 4), (4, 2), (4, 4)) for shape in SHAPES])
def deterministic_products_of_codes(bits: int, sets: int, width: int, num_out: int) -> Figures:
    """Few rows are multiplied by weights dequantized in registers, many by a matrix dequantized before."""
    _need()
    return _require_no_company(_ints(bits, sets, width, num_out, True), width)


@check([(group, *shape) for group in (32, 128) for shape in SHAPES])
def deterministic_products_of_fp8_codes(group: int, width: int, num_out: int) -> Figures:
    """And they are those of the widened matrix."""
    _need(fp8=True)
    scheme = _floats(group, width, num_out, True)
    wide = Matrix(scheme.ops, widen_groups(scheme.codes, scheme.scale, group).bfloat16())
    x = _rows(40, width)
    require(same_bits(scheme.matmul(x).cpu(), wide.matmul(x).cpu()), "other bits than of the widened matrix")
    return _require_no_company(scheme, width)


@check([(group, num_rows) for group in (32, 64, 128) for num_rows in (1, 5, 64, 128, 300, 600)])
def products_of_fp8_codes(group: int, num_rows: int) -> Figures:
    _need(fp8=True)
    scheme = _floats(group, 2048, 3072, False)
    exact = widen_groups(scheme.codes, scheme.scale, group)
    x = _rows(num_rows, 2048)
    expected = x.float() @ exact.T
    apart = float((scheme.matmul(x).float() - expected).norm() / expected.norm())
    rows = scheme.rows(torch.tensor([3071, 0], device=DEVICE))
    require(apart < 5e-3 and torch.equal(rows, exact[[3071, 0]]), f"far from the same weights: {apart:.2g}")
    return {"apart": apart}


@check([(num_tokens, way) for num_tokens in (1, 9, 300) for way in ("fast", "deterministic")])
def experts_in_fp8_codes(num_tokens: int, way: str) -> Figures:
    _need(fp8=True)
    scheme, x = _floats(128, 512, 16 * 256, way == "deterministic"), _rows(num_tokens, 512)
    ids = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:4] for i in range(num_tokens)])
    ids = ids.int().to(DEVICE)
    stack = widen_groups(scheme.codes, scheme.scale, 128).view(16, 256, 512)
    found = scheme.grouped_matmul(x, ids, 16).float()
    expected = torch.einsum("tc,tkoc->tko", x.float(), stack[ids.long()])
    apart = float((found - expected).norm() / expected.norm())
    require(apart < 5e-3, f"far from the same weights: {apart:.2g}")
    if way == "deterministic":
        alone = torch.cat([scheme.grouped_matmul(x[i : i + 1], ids[i : i + 1], 16) for i in range(min(9, num_tokens))])
        require(same_bits(alone.float().cpu(), found[:9].cpu()), "other bits alone")
    return {"apart": apart}


@lru_cache(maxsize=1)
def _quantized(name: str) -> Made:
    """A quantized folder, and transformers' model with the values it means."""
    one, folder = plain("Llama"), Path(_FOLDERS.name) / name
    meant = writers.quantize_folder(one.folder, folder, FOLDERS[name])
    model = copy.deepcopy(one.model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name in meant:
                parameter.copy_(torch.from_numpy(meant[parameter_name]))
    return Made(folder, model)


@check([(name, way) for name in FOLDERS for way in ("fast", "deterministic")])
def codes_of_a_folder(name: str, way: str) -> Figures:
    """Near transformers with the same values; deterministic, the same alone."""
    _need(fp8="fp8" in name)
    one, (least, most) = _quantized(name), BOUNDS.get(name, (0.9, 0.03))
    with engine(one.folder, dtype="auto", deterministic=way == "deterministic") as llm:
        told = answers(llm, PROMPTS, logprobs=1)
        same, apart = nearness(one.model, PROMPTS, told)
        held = next(entry.value for entry in told[0].applied if entry.kind == "weights")
        if way == "deterministic":
            alone = [ids(answers(llm, [prompt], logprobs=1))[0] for prompt in PROMPTS]
            require(alone == ids(told), "other answers alone")
    require(" as " not in held, f"the weights were widened: {held}")
    require(same >= least and apart <= most, f"far from the same values: own choice {same:.3f}, mean |Δ| {apart:.3g}")
    return {"own choice": same, "mean |Δ|": apart, "held": held}
