"""Examples of sampling ops."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.registry import Example
from penstock.ops.sampling.row_params import MAX_LOGPROBS, NUM_LOGPROBS, NUM_PARAMS
from tests.ops.examples.case import examples, integers, normal, permutation
from tests.ops.examples.rows import EachRow

_SHAPES = [(0, 8), (1, 49152), (3, 1), (5, 31), (7, 1000), (2, 1024), (4, 2500)]


def _logits() -> Iterator[Tensor]:
    """With many ties, with impossible tokens, with one value alone."""
    for seed, shape in enumerate(_SHAPES):
        yield normal(seed, *shape, scale=5.0)
        yield normal(seed, *shape, scale=3.0).round()
    masked = normal(9, 6, 2000).round()
    masked[:, 3:1990] = -torch.inf
    masked[4] = -torch.inf
    yield masked
    yield normal(11, 4, 96)[:, 16:80]


@examples(ops.argmax)
def _argmax() -> Iterator[Example]:
    for x in _logits():
        yield {"x": x}
    damaged = normal(12, 5, 1500)
    damaged[0, 1400] = torch.nan
    damaged[1, 3:9] = torch.nan
    damaged[2, 1030] = torch.inf
    damaged[3, [0, 1499]] = torch.nan
    yield {"x": damaged}


@examples(ops.above, EachRow("x", "least"))
def _above() -> Iterator[Example]:
    for x in _logits():
        for room in (0, 5, 400):
            yield {"x": x, "least": torch.linspace(-1.0, 8.0, max(1, x.shape[0]))[: x.shape[0]], "room": room}


@examples(ops.weight_sums, EachRow("x", "top", "temperature"))
def _weight_sums() -> Iterator[Example]:
    for x in _logits():
        if x.shape[0] == 6:
            x[4] = 1.0
        top = x.max(dim=-1).values if x.shape[0] else x[:, 0]
        yield {"x": x, "top": top, "temperature": torch.linspace(0.3, 2.5, max(1, x.shape[0]))[: x.shape[0]]}


@examples(ops.log_softmax)
def _log_softmax() -> Iterator[Example]:
    for seed, shape in enumerate([(0, 8), (1, 49152), (3, 1), (5, 31), (7, 1000)]):
        yield {"x": normal(seed, *shape, scale=5.0)}
    masked = normal(9, 4, 100)
    masked[:, 3:90] = -torch.inf
    yield {"x": masked}
    yield {"x": normal(10, 2, 33) * 1e4}


class _Reported(EachRow):
    def take(self, example: Example, keep: list[int]) -> Example:
        return super().take(example, keep) | {"rows": example["rows"][keep]}


@examples(ops.report, _Reported("logits", "tokens"))
def _report() -> Iterator[Example]:
    for seed, (num_rows, size) in enumerate([(0, 8), (3, 1), (4, 40), (5, 5000), (3, 40_000)]):
        numbers = torch.zeros((7, NUM_PARAMS))
        numbers[:, NUM_LOGPROBS] = torch.tensor([1.0, 0.0, 6.0, 21.0, MAX_LOGPROBS + 1.0, 2.0, 3.0])
        for dtype in (torch.float32, torch.bfloat16):
            yield {
                "logits": normal(seed, num_rows, size, scale=3.0).to(dtype),
                "tokens": integers(seed, size, num_rows).long(),
                "rows": torch.tensor([4, 1, 2, 3, 0, 5, 6])[:num_rows],
                "numbers": numbers,
            }


class _Sampled(EachRow):
    """temperature and keys are of the rows, or of entries that the rows name."""

    def take(self, example: Example, keep: list[int]) -> Example:
        own = ("rows",) if example.get("rows") is not None else ("temperature", "keys")
        return super().take(example, keep) | {name: example[name][keep] for name in own}


@examples(ops.sample, _Sampled("logits", "positions"))
def _sample() -> Iterator[Example]:
    for seed, (num_rows, size) in enumerate([(0, 8), (1, 49152), (3, 1), (5, 31), (7, 1000), (4, 20000)]):
        rows = torch.arange(num_rows)
        yield {
            "logits": normal(seed, num_rows, size, scale=3.0),
            "temperature": (rows % 3) * 0.5,
            "keys": (rows + 1) * 0x9E3779B97F4A7C15 % (1 << 62),
            "positions": rows * 7 + seed,
        }
        if num_rows > 1:
            yield {
                "logits": normal(seed, num_rows, size),
                "temperature": torch.linspace(0, 2, 9),
                "keys": integers(seed, 1 << 40, 9),
                "positions": rows,
                "rows": permutation(seed, 9)[:num_rows],
                "last": torch.zeros(9, dtype=torch.int64),
            }
    broken = normal(9, 5, 5000)
    broken[1, 4000], broken[2, 7], broken[3] = torch.nan, torch.inf, -torch.inf
    yield {
        "logits": broken,
        "temperature": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]),
        "keys": torch.arange(5),
        "positions": torch.arange(5),
    }
    few = torch.full((6, 9000), -torch.inf)
    few[:, [5, 4095, 8999]] = 1.0
    yield {"logits": few, "temperature": torch.ones(6), "keys": torch.arange(6), "positions": torch.arange(6)}
