"""Examples of elementwise ops, norms, embedding and pooling."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.elementwise import ACTIVATIONS
from penstock.ops.registry import Example
from tests.ops.examples.case import examples, integers, normal
from tests.ops.examples.rows import EachRow


def _activation_inputs(parts: int) -> Iterator[Example]:
    for kind in ACTIVATIONS:
        for seed, (num_rows, width) in enumerate([(0, 8), (1, 1536), (3, 1), (5, 31), (13, 100), (40, 1100)]):
            yield {"x": normal(seed, num_rows, parts * width, scale=4.0), "kind": kind}
        wide = [torch.linspace(-120, 120, 1999), *(normal(9, 1999) for _ in range(parts - 1))]
        yield {"x": torch.cat(wide).view(1, -1), "kind": kind}


@examples(ops.activation)
def _activation() -> Iterator[Example]:
    yield from _activation_inputs(1)


@examples(ops.gated_activation)
def _gated_activation() -> Iterator[Example]:
    yield from _activation_inputs(2)
    yield {"x": normal(3, 5, 2, 96, scale=5.0), "kind": "swiglu_oai"}  # of chosen experts


class _AddRows(EachRow):
    """y has the rows of x, or is one row for all of them."""

    def take(self, example: Example, keep: list[int]) -> Example:
        y = example["y"]
        return super().take(example, keep) | {"y": y if y.dim() == 1 else y[keep]}


@examples(ops.add, _AddRows("x"))
def _add() -> Iterator[Example]:
    for seed, (num_rows, width) in enumerate([(0, 8), (1, 576), (3, 1), (5, 31), (13, 100), (70, 1100)]):
        x, y = normal(seed, num_rows, width), normal(seed + 100, num_rows, width)
        yield {"x": x, "y": y, "scale": 1.0}
        yield {"x": x, "y": normal(seed + 200, width), "scale": 0.22}
    wide = normal(9, 4, 96)
    yield {"x": wide[:, :32], "y": wide[:, 64:], "scale": -1.5}


@examples(ops.take_columns)
def _take_columns() -> Iterator[Example]:
    for seed, (num_rows, width, count) in enumerate([(0, 8, 8), (1, 5, 1), (7, 576, 576), (50, 31, 0), (3, 90, 200)]):
        yield {"x": normal(seed, num_rows, width), "order": integers(seed, width, count)}
    yield {"x": normal(9, 6, 64)[:, 16:40], "order": integers(9, 24, 24)}


@examples(ops.gather, EachRow("at"))
def _gather() -> Iterator[Example]:
    for seed, (num_rows, width, count) in enumerate([(3, 8, 0), (1, 5, 1), (7, 576, 4), (50, 31, 90), (200, 600, 64)]):
        yield {"at": integers(seed, num_rows, count), "x": normal(seed, num_rows, width)}
    yield {"at": integers(9, 6, 4), "x": normal(9, 6, 64)[:, 16:40]}


@examples(ops.scale)
def _scale() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 1000), (3, 31), (2, 5, 7), (11, 9000)]):
        yield {"x": normal(seed, *shape), "factor": 24.0 if seed % 2 else 0.1}


@examples(ops.softcap)
def _softcap() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 1000), (3, 31), (2, 5, 7), (11, 1000)]):
        yield {"x": normal(seed, *shape, scale=40.0), "cap": 30.0}
    yield {"x": torch.linspace(-0.1, 0.1, 999).view(9, 111), "cap": 1.0}


@examples(ops.rms_norm, EachRow("x", "residual"))
def _rms_norm() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 576), (3, 1), (5, 31), (17, 100), (7, 3, 64), (2, 5, 20), (300, 128)]):
        yield {
            "x": normal(seed, *shape, scale=3.0),
            "weight": normal(seed + 100, shape[-1]),
            "eps": 1e-5,
            "residual": normal(seed + 200, *shape) if seed % 2 else None,
        }
    yield {"x": torch.zeros(2, 16), "weight": normal(9, 16), "eps": 1e-6, "residual": None}
    yield {
        "x": normal(10, 6, 4, 96).transpose(0, 1)[:, :, 16:80],
        "weight": normal(11, 64),
        "eps": 1e-6,
        "residual": None,
    }
    yield {"x": normal(12, 9, 48), "weight": normal(13, 48), "eps": 1e-6, "residual": normal(14, 48, 9).t()}


@examples(ops.layer_norm, EachRow("x", "residual"))
def _layer_norm() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 384), (3, 1), (5, 31), (17, 100), (7, 3, 64), (200, 128)]):
        yield {
            "x": normal(seed, *shape, scale=3.0) + 1,
            "weight": normal(seed + 100, shape[-1]),
            "bias": normal(seed + 200, shape[-1]) if seed % 2 else None,
            "eps": 1e-5,
            "residual": normal(seed + 300, *shape) if seed % 3 else None,
        }


@examples(ops.embedding)
def _embedding() -> Iterator[Example]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shapes = [(0, 16, 8), (1, 1, 5), (7, 33, 64), (31, 100, 17), (600, 90, 64)]
        for seed, (num_ids, num_rows, width) in enumerate(shapes):
            yield {
                "ids": integers(seed, num_rows, num_ids),
                "width": width,
                "panels": ops.pack_panels(normal(seed, num_rows, width, dtype=dtype)),
            }


class _Pooled:
    """A row is a sequence."""

    def count(self, example: Example) -> int:
        return int(example["query_start"].shape[0]) - 1

    def take(self, example: Example, keep: list[int]) -> Example:
        parts = [example["hidden"][begin:end] for begin, end in pairwise(example["query_start"].tolist())]
        counts = [len(parts[s]) for s in keep]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return example | {"hidden": torch.cat([parts[s] for s in keep]), "query_start": starts}

    def outputs(self, example: Example, result: Tensor, keep: list[int]) -> Tensor:
        return result[keep]


@examples(ops.pooling, _Pooled())
def _pooling() -> Iterator[Example]:
    for seed, (counts, width) in enumerate([([], 8), ([1], 384), ([5, 1, 70, 13], 31), ([130, 64, 16], 100)]):
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        for first in (False, True):
            yield {
                "hidden": normal(seed, sum(counts), width),
                "query_start": starts,
                "first": first,
                "normalize": seed % 2 == 0,
            }
    yield {
        "hidden": torch.zeros(3, 16),
        "query_start": torch.tensor([0, 3], dtype=torch.int32),
        "first": False,
        "normalize": True,
    }


@examples(ops.local_ids, EachRow("ids"))
def _local_ids() -> Iterator[Example]:
    for seed, (num_rows, first, count) in enumerate([(0, 3, 4), (1, 0, 1), (9, 10, 16), (70, 16, 48)]):
        for dtype in (torch.int64, torch.int32):
            ids = integers(seed, 64, num_rows).to(dtype)
            yield {"ids": ids, "first": first, "count": count, "clamps": False}
            yield {"ids": ids, "first": first, "count": count, "clamps": True}
    yield {"ids": integers(9, 8, 12).view(6, 2), "first": 2, "count": 4, "clamps": False}


@examples(ops.blank_rows, EachRow("x", "ids"))
def _blank_rows() -> Iterator[Example]:
    for seed, (num_rows, width) in enumerate([(0, 8), (1, 5), (9, 31), (70, 576)]):
        for dtype in (torch.int64, torch.int32):
            yield {"x": normal(seed, num_rows, width), "ids": (integers(seed, 3, num_rows) - 1).to(dtype)}
    yield {"x": normal(9, 6, 64)[:, 16:40], "ids": integers(9, 2, 6) - 1}
