"""Examples of recurrent ops."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penstock import ops
from penstock.ops.registry import Example
from tests.ops.examples.case import examples, normal
from tests.ops.examples.rows import EachState

COUNTS = [[1], [0, 3], [5, 1, 1, 9], [2, 40]]  # tokens of each sequence


def _query_start(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)


@examples(ops.causal_conv, EachState("tail", "x"))
def _causal_conv() -> Iterator[Example]:
    for seed, (counts, (channels, size)) in enumerate(zip(COUNTS, [(8, 4), (33, 2), (24, 3), (7, 4)])):
        yield {
            "x": normal(seed, sum(counts), channels + 3)[:, 3:],
            "weight": normal(seed + 100, channels, size),
            "bias": normal(seed + 200, channels) if seed % 2 else None,
            "tail": normal(seed + 300, len(counts), size - 1, channels),
            "query_start": _query_start(counts),
        }


@examples(ops.state_scan, EachState("state", "x", "dt", "b", "c"))
def _state_scan() -> Iterator[Example]:
    shapes = [(4, 8, 2, 16), (3, 5, 1, 7), (8, 16, 8, 4), (6, 3, 3, 9)]
    for seed, (counts, (heads, head_size, groups, size)) in enumerate(zip(COUNTS, shapes)):
        num_tokens = sum(counts)
        yield {
            "x": normal(seed, num_tokens, heads, head_size),
            "dt": normal(seed + 100, num_tokens, heads),
            "a": -normal(seed + 200, heads).exp(),
            "b": normal(seed + 300, num_tokens, groups, size),
            "c": normal(seed + 400, num_tokens, groups, size),
            "d": normal(seed + 500, heads),
            "state": normal(seed + 600, len(counts), heads, head_size, size),
            "query_start": _query_start(counts),
        }
