"""Attention gives a query the same bits whatever the chunks, block sizes and place of its blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.ops.attention import paged
from penstock.ops.example import normal, permutation
from tests.ops.check import same_bits

LENGTH, HEADS, KV_HEADS, SIZE = 150, 6, 2, 24


def _run(block: int, starts: list[int], window: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0,
         poison: bool = False) -> Tensor:
    """Compute LENGTH positions in the steps that begin at `starts`, keys and values going through cache_write."""
    q, k, v = (normal(i, LENGTH, heads, SIZE) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    used = -(-LENGTH // block)
    blocks = permutation(seed, used + 3)[:used].to(torch.int32)
    pool = torch.full((used + 3, 2, KV_HEADS, block, SIZE), float("nan") if poison else 0.0, dtype=dtype)
    outputs = []
    for begin, end in zip(starts, [*starts[1:], LENGTH]):
        positions = torch.arange(begin, end)
        slots = blocks[positions // block].long() * block + positions % block
        ops.cache_write(k[begin:end], v[begin:end], pool[:, 0], pool[:, 1], slots)
        table = blocks[: -(-end // block)].clone()
        if window:
            table[: max(0, begin - window + 1) // block] = -1
        outputs.append(ops.attention(q[begin:end], pool[:, 0], pool[:, 1], table[None], torch.tensor([0, end - begin]),
                                     torch.tensor([end]), SIZE**-0.5, window))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 1, 40, 64])
def test_chunks_and_blocks_do_not_matter(dtype: torch.dtype, window: int, path: str) -> None:
    whole = _run(16, [0], window, dtype)
    assert whole.isfinite().all()
    assert same_bits(_run(16, [0, 1, 2, 63, 65, 100, 129], window, dtype), whole)
    assert same_bits(_run(16, list(range(LENGTH)), window, dtype, seed=1), whole)
    for block in (1, 8, 32, 61, 200):
        assert same_bits(_run(block, [0, 77], window, dtype, seed=2), whole)


def test_positions_out_of_sight_are_not_read(path: str) -> None:
    """Blocks never written hold NaN; unused table entries are -1."""
    for window in (0, 33):
        assert same_bits(_run(16, [0, 50, 51], window, poison=True), _run(16, [0], window))


def test_a_table_that_leads_nowhere_is_refused(path: str) -> None:
    for bad in (-1, 10**6):
        example = paged(1, [(1, 40)], 2, 1, 16)
        example["table"][0, 1] = bad
        with pytest.raises(IndexError):
            ops.attention(**example)
    example = paged(1, [(1, 40)], 2, 1, 16)
    example["table"] = example["table"][:, :2]
    with pytest.raises(IndexError):
        ops.attention(**example)


def test_indices_out_of_range_are_refused(path: str) -> None:
    panels = ops.pack_panels(normal(0, 16, 8))
    pool = torch.zeros(2, 2, 1, 4, 8)
    k = normal(1, 1, 1, 8)
    for bad in (-1, 16):
        with pytest.raises(IndexError):
            ops.embedding(torch.tensor([bad]), panels, 8)
        with pytest.raises(IndexError):
            ops.cache_write(k, k, pool[0], pool[1], torch.tensor([bad]))
        with pytest.raises(IndexError):
            ops.rope(k, torch.tensor([bad]), torch.ones(16, 4), torch.ones(16, 4))
    assert not pool.any()
