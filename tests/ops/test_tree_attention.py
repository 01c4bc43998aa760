"""A node of a tree gets the bits that it gets at the end of its path written as a line; moved paths are such lines."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.ops import cpu
from tests.ops.check import same_bits
from tests.ops.examples.attention import paged
from tests.ops.examples.trees import BUSH, find_paths, with_trees

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8]


def draw_tree(rng: random.Random, size: int) -> list[int]:
    """Parents of `size` nodes: deep, wide, or both."""
    reach = rng.choice((1, 2, 3, size))
    return [rng.randrange(max(-1, i - 1 - reach), i) if i else -1 for i in range(size)]


def slot_of(example: dict[str, Any], s: int, place: int) -> int:
    size = example["k_cache"].shape[3]
    return int(example["table"][s, place // size]) * size + place % size


def move_path(example: dict[str, Any], s: int, path: list[int]) -> dict[str, Any]:
    """The call after the path's keys and values were moved to the begin of the tail."""
    moved = example | {name: x.clone() for name, x in example.items() if "cache" in name or name.endswith("_scale")}
    begin = int(example["tail"].begins[s])
    moves = [[slot_of(example, s, begin + i) for i in pair] for pair in zip(path, range(len(path)))]
    caches = {name: moved[name] for name in moved if "cache" in name or name.endswith("_scale")}
    ops.cache_move(**caches, moves=torch.tensor(moves))
    return moved


def attend_line(example: dict[str, Any], s: int, t: int, length: int) -> Tensor:
    """The query `t` alone, at the end of a line of so many positions."""
    given = {name: x for name, x in example.items() if name != "tail"}
    given |= {"q": example["q"][t : t + 1], "table": example["table"][s : s + 1]}
    return ops.attention(**given | {"query_start": torch.tensor([0, 1]), "lengths": torch.tensor([length])})


def check_nodes(example: dict[str, Any], trees: list[list[int]]) -> None:
    found = ops.tree_attention(**example)
    for s, tree in enumerate(trees):
        begin, end = int(example["tail"].begins[s]), int(example["query_start"][s + 1])
        for path in find_paths(tree):
            t = end - len(tree) + path[-1]
            wanted = attend_line(move_path(example, s, path), s, t, begin + len(path))
            assert same_bits(found[t : t + 1], wanted), f"node {path} of sequence {s}"
        for t in range(int(example["query_start"][s]), end - len(tree)):
            wanted = attend_line(example, s, t, int(example["lengths"][s]) - (end - 1 - t))
            assert same_bits(found[t : t + 1], wanted), f"query {t} before the tree"


RULES: list[dict[str, Any]] = [{}, {"window": 30}, {"window": 3}, {"softcap": 8.0, "alibi": True, "window": 70}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), [(9, 3, 64, 16), (2, 2, 80, 8), (7, 1, 34, 24)])
def test_every_node_is_the_end_of_a_line(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, block: int, path: str
) -> None:
    """Breaks when a node sees another's branch, or sums its path in another order than a line is summed."""
    rng = random.Random(heads)
    for rule in RULES:
        rule = rule | {"alibi": torch.linspace(0.0, 0.3, heads)} if "alibi" in rule else rule
        trees = [draw_tree(rng, rng.randint(1, 12)) for _ in range(4)] + [[]]
        befores = [rng.choice((0, 1, 57, 63, 64, 65, 120, 200)) for _ in trees]  # tails cross chunks or begin one
        sequences = [(len(tree) + min(before, 2), before + len(tree)) for tree, before in zip(trees, befores)]
        sequences[-1] = (3, 40)
        check_nodes(with_trees(paged(5, sequences, heads, kv_heads, size, block, dtype, **rule), trees), trees)


def test_a_long_sequence_is_shared_among_threads(path: str, threads: None) -> None:
    for parents in ([-1, -1], BUSH):
        example = with_trees(paged(3, [(1 + len(parents), 1500)], 3, 1, 64, dtype=torch.float16), [parents])
        for count in (1, 2, 5):
            cpu.set_num_threads(count)
            check_nodes(example, [parents])


@pytest.mark.parametrize(
    ("name", "index", "bad"),
    [("begins", 0, -1), ("positions", 8, 70), ("positions", 0, -1), ("nodes", (8, 0), 8), ("nodes", (3, 1), -1)],
)
def test_a_tail_that_leads_nowhere_is_refused(name: str, index: Any, bad: int, path: str) -> None:
    example = with_trees(paged(1, [(9, 70)], 2, 1, 16), [BUSH])
    getattr(example["tail"], name)[index] = bad
    with pytest.raises(IndexError):
        ops.tree_attention(**example)


def test_moves_out_of_range_are_refused(path: str) -> None:
    example = with_trees(paged(1, [(9, 70)], 2, 1, 16), [BUSH])
    caches = {name: example[name] for name in ("k_cache", "v_cache")}
    for bad in (-1, 10**6):
        with pytest.raises(IndexError):
            ops.cache_move(**caches, moves=torch.tensor([[0, bad]]))
    with pytest.raises(ValueError, match="a source and a target"):
        ops.cache_move(**caches, moves=torch.tensor([0, 1]))
