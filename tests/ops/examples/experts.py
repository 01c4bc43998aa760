"""Examples of a mixture of experts' ops: every rule of routing, every storage of experts, lists of every length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock import ops
from penstock.ops import RouterRule
from penstock.ops.matmul.fp8_product import quantize_fp8
from penstock.ops.matmul.packed import FORMATS
from penstock.ops.registry import Example
from tests.ops.examples.case import examples, integers, normal, with_epilogue
from tests.ops.examples.matmul import fp8_groups, int_weight, packed_weight
from tests.ops.examples.rows import EachRow


class EachRoute(EachRow):
    """A row's experts and their weights."""

    def outputs(self, example: Example, result: Any, keep: list[int]) -> Tensor:
        ids, weights = result
        return torch.cat([ids[keep].float(), weights[keep]], dim=1)


RULES: list[tuple[int, RouterRule, bool]] = [  # experts, rule, with a bias for the choice
    (4, RouterRule(2, normalizes=True), False),
    (64, RouterRule(6), False),
    (5, RouterRule(5, normalizes=True, scale=2.5), False),
    (160, RouterRule(6, num_groups=8, top_groups=3, scale=16.0), False),
    (32, RouterRule(4, "sigmoid", normalizes=True, num_groups=4, top_groups=2, best_of_group=2), True),
    (128, RouterRule(8, "sigmoid", scale=0.5), True),
    (16, RouterRule(1, "sigmoid"), False),
    (16, RouterRule(2, "sparsemixer", jitter=0.01), False),
    (16, RouterRule(2, "sparsemixer", jitter=1.0), False),
]


@examples(ops.route, EachRoute("logits"))
def _route() -> Iterator[Example]:
    for seed, (num_experts, rule, biased) in enumerate(RULES):
        for num_rows in (0, 1, 7, 33):
            yield {
                "logits": normal(seed + num_rows, num_rows, num_experts, scale=2.0),
                "bias": normal(seed, num_experts, scale=0.3) if biased else None,
                "rule": rule,
            }
    equal = torch.tensor(
        [
            [1.0, 3.0, 3.0, 1.0, 3.0],
            [2.0] * 5,
            [-100.0, 100.0, -100.0, 0.0, 100.0],
            [0.0] * 5,
            [-1.0, 0.0, 0.0, -2.0, 0.0],
        ]
    )
    for rule in (RouterRule(2), RouterRule(3, "sigmoid"), RouterRule(2, "sparsemixer", jitter=0.1)):
        yield {"logits": equal, "bias": None, "rule": rule}  # of equal ones the first


def _ids(seed: int, num_rows: int, num_matrices: int, num_chosen: int) -> Tensor:
    """Different matrices for a row in ascending order, some of them none; for some calls all the same one."""
    chosen = [torch.randperm(num_matrices, generator=torch.Generator().manual_seed(seed + i)) for i in range(num_rows)]
    ids = torch.stack([one[:num_chosen].sort().values for one in chosen]).int() if chosen else None
    ids = torch.empty(0, num_chosen, dtype=torch.int32) if ids is None else ids
    ids[:, 0] = torch.where(ids[:, 0] % 3 == 1, -1, ids[:, 0])
    return torch.full_like(ids, num_matrices - 1) if seed % 4 == 3 else ids


# Rows, width, outputs of a matrix, matrices, chosen ones.
SIZES = [
    (0, 8, 16, 3, 2),
    (1, 64, 48, 8, 3),
    (5, 17, 32, 4, 1),
    (40, 96, 16, 2, 2),
    (23, 33, 96, 12, 4),
    (70, 64, 32, 3, 2),
]


def _call(seed: int, size: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """The arguments that all grouped products take: x shared by a row's matrices or not, gated or not, with a bias."""
    num_rows, width, num_out, num_matrices, num_chosen = size
    shape = (num_rows, width) if seed % 2 else (num_rows, num_chosen, width)
    return with_epilogue(
        {
            "x": normal(seed + 1, *shape),
            "ids": _ids(seed, num_rows, num_matrices, num_chosen),
            "num_matrices": num_matrices,
            "bias": normal(seed + 2, num_matrices * num_out) if seed % 3 == 1 else None,
            "activation": ("silu", None, "swiglu_oai" if num_out % 32 == 0 else "relu")[seed % 3],
            "gated": num_out % 32 == 0 and seed % 3 != 1,
        }
    )


def _in_order(call: dict[str, Any], **weights: Any) -> Example:
    return {"x": call["x"], **weights, **{name: call[name] for name in call if name != "x"}}


@examples(ops.grouped_matmul, EachRow("x", "ids"))
def _grouped_matmul() -> Iterator[Example]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed, size in enumerate(SIZES):
            _, width, num_out, num_matrices, _ = size
            weight = normal(seed, num_matrices * num_out, width, scale=width**-0.5, dtype=dtype)
            yield _in_order(_call(seed, size), panels=ops.pack_panels(weight))


@examples(ops.grouped_packed_matmul, EachRow("x", "ids"))
def _grouped_packed_matmul() -> Iterator[Example]:
    for number, format in enumerate(FORMATS.values()):
        for seed, size in enumerate(SIZES):
            num_rows, width, num_out, num_matrices, num_chosen = size
            width = -(-width // 256) * 256 if format.supers else width
            weight = packed_weight(number, format, num_matrices * num_out, width)
            call = _call(seed, (num_rows, width, num_out, num_matrices, num_chosen))
            yield _in_order(call, parts=(weight,), x_bits=0 if seed == 4 else 8)
    call = _call(4, (9, 64, 48, 5, 3))  # two stacks of different types: 32 outputs of each matrix, then 16
    parts = packed_weight(1, FORMATS["Q4_0"], 5 * 32, 64), packed_weight(2, FORMATS["Q8_0"], 5 * 16, 64)
    yield _in_order(call, parts=parts, x_bits=8)


@examples(ops.weigh, EachRow("x", "weights"))
def _weigh() -> Iterator[Example]:
    for seed, (num_rows, num_chosen, width) in enumerate([(0, 2, 8), (1, 8, 64), (5, 1, 33), (13, 3, 100)]):
        yield {"x": normal(seed, num_rows, width), "weights": normal(seed + 1, num_rows, num_chosen)}


# The interpreter takes as long for one program as for the next: a GPU's own ops have fewer of them.
GPU_SIZES = [(0, 8, 16, 3, 2), (1, 64, 48, 8, 3), (5, 17, 32, 4, 1), (40, 96, 16, 2, 2), (23, 32, 96, 12, 4)]


@examples(ops.grouped_product, EachRow("x", "ids"))
def _grouped_product() -> Iterator[Example]:
    for seed, size in enumerate(GPU_SIZES):
        for dtype in (torch.float32, torch.bfloat16) if seed % 2 else (torch.float32, torch.float16):
            _, width, num_out, num_matrices, _ = size
            weight = normal(seed, num_matrices * num_out, width, scale=width**-0.5, dtype=dtype)
            call = _call(seed, size)
            yield _in_order(call | {"x": call["x"].to(dtype)}, weight=weight)


@examples(ops.grouped_fp8_product, EachRow("x", "ids"))
def _grouped_fp8_product() -> Iterator[Example]:
    for seed, size in enumerate([(1, 64, 48, 8, 3), (40, 96, 16, 2, 2), (23, 128, 96, 12, 4)]):
        _, width, num_out, num_matrices, _ = size
        codes, scale = quantize_fp8(normal(seed, num_matrices * num_out, width, scale=width**-0.5))
        call = _call(seed + 1, size)
        yield _in_order(call | {"x": call["x"].bfloat16()}, codes=codes, scale=scale)


@examples(ops.grouped_fp8_group_product, EachRow("x", "ids"))
def _grouped_fp8_group_product() -> Iterator[Example]:
    for seed, size in enumerate([(1, 64, 48, 8, 3), (5, 112, 32, 4, 1), (23, 256, 96, 12, 4)]):
        _, width, num_out, num_matrices, _ = size
        codes, scale = fp8_groups(seed, num_matrices * num_out, width, 32 << seed)
        call = _call(seed, size)
        dtype = torch.float16 if seed else torch.float32  # the interpreter cannot multiply bfloat16
        yield _in_order(call | {"x": call["x"].to(dtype)}, codes=codes, scale=scale, group=32 << seed)


@examples(ops.grouped_int_product, EachRow("x", "ids"))
def _grouped_int_product() -> Iterator[Example]:
    for bits in (8, 4):
        for seed, size in enumerate([(1, 64, 48, 8, 3), (5, 100, 32, 4, 1), (23, 128, 96, 12, 4), (3, 200, 20, 40, 2)]):
            _, width, num_out, num_matrices, _ = size
            words, scales = int_weight(seed, bits, num_matrices * num_out, width)
            call = _call(seed, size)
            dtype = torch.float16 if seed else torch.float32  # the interpreter cannot multiply bfloat16
            yield _in_order(call | {"x": call["x"].to(dtype)}, words=words, scales=scales)


@examples(ops.combine, EachRow("y", "weights", "shared", "gate", "residual"))
def _combine() -> Iterator[Example]:
    for seed, (num_rows, num_chosen, width) in enumerate(
        [(0, 2, 8), (1, 8, 64), (5, 1, 33), (13, 3, 100), (40, 4, 576)]
    ):
        yield {
            "y": normal(seed, num_rows, num_chosen, width),
            "weights": normal(seed + 1, num_rows, num_chosen) if seed != 3 else None,
            "shared": normal(seed + 2, num_rows, width) if seed % 2 else None,
            "gate": normal(seed + 3, num_rows, 1) if seed % 4 == 1 else None,
            "residual": normal(seed + 4, num_rows, width) if seed % 3 else None,
        }


def other_ids(call: Example) -> Tensor:
    """The same number of ids, of other matrices."""
    return integers(99, call["num_matrices"], *call["ids"].shape, dtype=torch.int32)
