"""One row of each sequence's hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.registry import Example, op

LEAST = 1e-12  # of a row's length


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


def _examples() -> Iterator[Example]:
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


@op(tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}, examples=_examples, rows=_Pooled())
def pooling(hidden: Tensor, query_start: Tensor, first: bool, normalize: bool) -> Tensor:
    """hidden[T, C] → [S, C] float32: of each sequence query_start[s]:query_start[s+1] the mean of its rows or the
    first of them, at length 1 if it is normalized. Each is summed on its own, in float64 here."""
    rows = []
    for begin, end in pairwise(query_start.tolist()):
        tokens = hidden[begin:end].double()
        row = tokens[0] if first else tokens.sum(0) / (end - begin)
        if normalize:
            row = row / row.square().sum().sqrt().clamp(min=LEAST)
        rows.append(row.float())
    return torch.stack(rows) if rows else hidden.new_zeros((0, hidden.shape[1]), dtype=torch.float32)
