"""Attention over latents: a node of a tree gets the bits of a line, and what a query cannot see cannot touch it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops
from tests.ops.check import same_bits
from tests.ops.examples.latent import FLOATS, paged_latents
from tests.ops.examples.trees import BUSH, find_paths, with_trees


def slot_of(example: dict[str, Any], s: int, place: int) -> int:
    size = example["cache"].shape[1]
    return int(example["table"][s, place // size]) * size + place % size


def attend_line(example: dict[str, Any], cache: Tensor, s: int, t: int, length: int) -> Tensor:
    """Query `t` alone, at the end of a line of so many positions."""
    some = {name: example[name][t : t + 1] for name in ("q", "q_rope")}
    ends = {"query_start": torch.tensor([0, 1]), "lengths": torch.tensor([length])}
    line = example | some | ends | {"cache": cache, "table": example["table"][s : s + 1], "tail": None}
    return ops.latent_attention(**line)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", [1, 16])
def test_a_node_gets_the_bits_of_its_path_as_a_line(path: str, dtype: torch.dtype, block: int) -> None:
    rng = random.Random(block)
    trees = [BUSH, [rng.randrange(max(-1, i - 4), i) if i else -1 for i in range(20)]]
    given = paged_latents(3, [(9, 140), (20, 62)], 18, (24, 8), block, dtype)
    example = with_trees(given, trees)
    found = ops.latent_attention(**example)
    for s, tree in enumerate(trees):
        begin, end = int(example["tail"].begins[s]), int(example["query_start"][s + 1])
        for nodes in find_paths(tree):
            cache = example["cache"].clone()
            moves = [[slot_of(example, s, begin + i) for i in pair] for pair in zip(nodes, range(len(nodes)))]
            ops.latent_move(cache, torch.tensor(moves))
            t = end - len(tree) + nodes[-1]
            assert same_bits(found[t : t + 1], attend_line(example, cache, s, t, begin + len(nodes))), (s, nodes)


def test_what_comes_later_is_not_touched(path: str) -> None:
    """NaN beyond each query's position: in later tokens of its chunk, of the next one, and in unwritten places."""
    example = paged_latents(5, [(70, 130), (1, 65)], 3, (20, 6))
    wanted = ops.latent_attention(**example)
    cache = example["cache"].clone()
    for place in range(100, 144):
        cache.view(-1, 26)[slot_of(example, 0, place)] = torch.nan
    found = ops.latent_attention(**example | {"cache": cache})
    seen = 100 - 60  # of the first sequence's queries, which begin at position 60
    assert same_bits(found[:seen], wanted[:seen]) and found[seen:70].isnan().all()
    assert same_bits(found[70:], wanted[70:])


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": torch.tensor([1, 65])},  # fewer positions than queries
        {"lengths": torch.tensor([400, 65])},  # more than the table has blocks for
        {"table": torch.full((2, 9), 999)},
    ],
)
def test_bad_indices_are_refused(path: str, change: dict[str, Any]) -> None:
    with pytest.raises(IndexError):
        ops.latent_attention(**paged_latents(5, [(70, 130), (1, 65)], 3, (20, 6)) | change)


def test_slots_outside_the_cache_are_refused(path: str) -> None:
    cache, slots = torch.zeros(3, 4, 10), torch.tensor([12])
    with pytest.raises(IndexError):
        ops.latent_write(torch.ones(1, 8), torch.ones(1, 2), cache, slots)
    for moves in ([[0, 12]], [[-1, 0]]):
        with pytest.raises(IndexError):
            ops.latent_move(cache, torch.tensor(moves))
