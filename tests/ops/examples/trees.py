"""Examples of the ops for draft tokens that form trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.registry import Example
from tests.ops.examples.attention import cache_pool, paged
from tests.ops.examples.case import examples, normal
from tests.ops.examples.rows import EachNode, EachSlot


def find_paths(parents: Sequence[int]) -> list[list[int]]:
    """The nodes from the root to each node, itself included."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    return paths


def with_trees(example: Example, trees: Sequence[Sequence[int]]) -> Example:
    """Make the last queries of each sequence nodes of a tree, given by their parents; none for a line."""
    ends, lengths = example["query_start"][1:].tolist(), example["lengths"].tolist()
    width = max([len(tree) for tree in trees] + [1])
    nodes = torch.full((example["q"].shape[0], width), -9, dtype=torch.int32)
    positions = torch.cat(
        [torch.arange(n - c, n) for n, c in zip(lengths, example["query_start"].diff().tolist())] or [torch.empty(0)]
    ).long()
    begins = example["lengths"].clone()
    for s, tree in enumerate(trees):
        begins[s] -= len(tree)
        for path in find_paths(tree):
            t = ends[s] - len(tree) + path[-1]
            positions[t] = int(begins[s]) + len(path) - 1
            nodes[t, : len(path)] = torch.tensor(path)
    return example | {"tail": ops.Tail(begins, positions, nodes)}


LINE: list[int] = []
BUSH = [-1, 0, 1, 0, 3, -1, 5, -1]  # two levels of branches


@examples(ops.tree_attention, EachNode())
def _tree_attention() -> Iterator[Example]:
    yield with_trees(paged(0, [], 2, 1, 8), [])
    yield with_trees(paged(1, [(9, 70), (1, 40)], 9, 3, 64), [BUSH, LINE])
    yield with_trees(paged(2, [(5, 66), (3, 3), (20, 90)], 4, 2, 16, window=33), [[-1, -1, 0, 1], [-1, -1], BUSH])
    yield with_trees(paged(8, [(5, 66), (9, 70)], 4, 2, 16, window=-33), [[-1, -1, 0, 1], BUSH])
    yield with_trees(paged(3, [(9, 137), (9, 9)], 6, 6, 24, block=1, alibi=torch.linspace(0.01, 0.5, 6)), [BUSH, BUSH])
    yield with_trees(paged(7, [(9, 137), (9, 9)], 6, 6, 24, sinks=torch.linspace(-9, 9, 6)), [BUSH, BUSH])
    for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.uint8):
        size = 33 if dtype is not torch.uint8 else 34
        yield with_trees(paged(4, [(12, 132), (2, 66)], 4, 2, size, dtype=dtype, window=50, softcap=30.0), [BUSH, [-1]])
        yield with_trees(paged(5, [(9, 700), (4, 30)], 9, 3, 64, dtype=dtype), [BUSH, LINE])
        yield with_trees(paged(6, [(2, 300), (9, 64)], 2, 1, 96, block=32, dtype=dtype), [[-1], BUSH])


class _EachHead(EachSlot):
    """Heads of the caches, which are written in place."""

    def count(self, example: Example) -> int:
        return int(example["k_cache"].shape[1])

    def take(self, example: Example, keep: list[int]) -> Example:
        return example | {name: x[:, keep].contiguous() for name, x in example.items() if name != "moves"}

    def outputs(self, example: Example, result: object, keep: list[int]) -> Tensor:
        caches = [x[:, keep].transpose(0, 1).flatten(1).float() for name, x in example.items() if name != "moves"]
        return torch.cat(caches, dim=1)


@examples(ops.cache_move, _EachHead("k_cache"))
def _cache_move() -> Iterator[Example]:
    chains = [[], [(1, 3)], [(5, 3), (6, 4), (4, 6)], [(i, 30 - i) for i in range(12)]]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8):
        for seed, (moves, (heads, size, block)) in enumerate(
            zip(chains, [(1, 8, 4), (3, 64, 16), (2, 33, 4), (5, 20, 1)])
        ):
            size += size % 2 if dtype is torch.uint8 else 0
            caches = cache_pool(32, heads, block, size, dtype)
            k, v = (normal(seed + i, 32 * block, heads, size) for i in (0, 1))
            ops.cache_write.reference(k, v, slots=torch.arange(32 * block), **caches)
            yield {**caches, "moves": torch.tensor(moves, dtype=torch.int64).view(-1, 2)}
