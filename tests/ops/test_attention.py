"""Attention gives a query the same bits whatever the chunks, block sizes, threads and place of its blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.ops import cpu
from penstock.ops.attention.cache import read_cache
from tests.ops.check import same_bits
from tests.ops.examples import normal, permutation
from tests.ops.examples.attention import cache_pool, paged

LENGTH = 150
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8]


def _run(
    block: int,
    starts: list[int],
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    poison: bool = False,
    heads: int = 6,
    kv_heads: int = 2,
    size: int = 24,
    **rule: Any,
) -> Tensor:
    """Compute LENGTH positions in the steps that begin at `starts`, keys and values going through cache_write."""
    q, k, v = (normal(i, LENGTH, num, size) for i, num in enumerate((heads, kv_heads, kv_heads)))
    used = -(-LENGTH // block)
    blocks = permutation(seed, used + 3)[:used].to(torch.int32)
    caches: dict[str, Any] = cache_pool(used + 3, kv_heads, block, size, dtype, fill=float("nan") if poison else 0.0)
    outputs = []
    for begin, end in zip(starts, [*starts[1:], LENGTH]):
        positions = torch.arange(begin, end)
        slots = blocks[positions // block].long() * block + positions % block
        ops.cache_write(k[begin:end], v[begin:end], **caches, slots=slots)
        table = blocks[: -(-end // block)].clone()
        if window:
            table[: max(0, begin - window + 1) // block] = -1
        outputs.append(
            ops.attention(
                q[begin:end],
                **caches,
                table=table[None],
                lengths=torch.tensor([end]),
                query_start=torch.tensor([0, end - begin]),
                scale=size**-0.5,
                window=window,
                **rule,
            )
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 40, 64])
def test_chunks_and_blocks_do_not_matter(dtype: torch.dtype, window: int, path: str) -> None:
    whole = _run(16, [0], window, dtype)
    assert whole.isfinite().all()
    assert same_bits(_run(16, [0, 1, 2, 63, 65, 100, 129], window, dtype), whole)
    assert same_bits(_run(16, list(range(LENGTH)), window, dtype, seed=1), whole)
    for block in (1, 8, 32, 61, 200):
        assert same_bits(_run(block, [0, 77], window, dtype, seed=2), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (8, 1, 32), (2, 2, 80), (7, 1, 34), (13, 1, 16)])
def test_rows_read_in_place_or_converted_before(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, path: str
) -> None:
    """Many rows at once convert a chunk first, few read it in place, odd sizes always convert: the same bits."""
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "size": size}
    alibi = torch.linspace(0.0, 0.3, heads)
    for rule in ({}, {"softcap": 5.0}, {"alibi": alibi}, {"softcap": 8.0, "alibi": alibi, "window": 70}):
        whole = _run(16, [0], dtype=dtype, **shape, **rule)
        assert same_bits(_run(16, [*range(0, 120), 140], dtype=dtype, seed=1, **shape, **rule), whole)
        assert same_bits(_run(24, [0, 100, 101, 103], dtype=dtype, seed=3, **shape, **rule), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "window"), [(9, 3, 64, 0), (4, 1, 256, 512), (3, 3, 20, 0)])
def test_a_long_sequence_is_shared_among_threads(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int, path: str, threads: None
) -> None:
    """Pieces of a sequence whose partials are merged at the end give the bits of the sequence in one piece."""
    example = paged(3, [(1, 2100)], heads, kv_heads, size, dtype=dtype, window=window)
    cpu.set_num_threads(1)
    crowd = paged(3, [(1, 2100)] * 20, heads, kv_heads, size, dtype=dtype, window=window)
    crowd |= {"table": example["table"].expand(20, -1), "q": example["q"].expand(20, -1, -1)}
    crowd |= {name: example[name] for name in example if "cache" in name or name.endswith("_scale")}
    whole = ops.attention(**crowd)
    for count in (1, 2, 5, 40):
        cpu.set_num_threads(count)
        assert same_bits(ops.attention(**example), whole[:1])
        assert same_bits(ops.attention(**crowd), whole)


def test_positions_out_of_sight_are_not_read(path: str) -> None:
    """Blocks never written hold NaN; unused table entries are -1."""
    for window in (0, 33):
        for dtype in DTYPES:
            for size in (24, 32):
                poisoned = _run(16, [0, 50, 51], window, dtype, poison=True, size=size)
                assert same_bits(poisoned, _run(16, [0], window, dtype, size=size))


def test_infinite_values_stay_behind_the_edge_of_sight(path: str) -> None:
    """A later token's broken value must not reach earlier ones, whose weight for it is none, not 0."""
    example = paged(5, [(40, 40)], 3, 3, 16, block=16)
    before = ops.attention(**example)
    block = int(example["table"][0, 1])
    example["v_cache"][block, :, 4:] = torch.inf
    after = ops.attention(**example)
    assert same_bits(after[:20], before[:20]) and not after[20:].isfinite().any()


def test_nan_is_not_hidden(path: str) -> None:
    for name in ("k_cache", "v_cache"):
        example = paged(6, [(1, 100)], 2, 1, 32)
        block = int(example["table"][0, 2])
        example[name][block] = torch.nan
        assert ops.attention(**example).isnan().all()


def test_int8_is_near(path: str) -> None:
    """Half a step of a 127th of each row's largest number bounds what is stored; what comes out is as near."""
    for size in (16, 33, 64, 256):
        whole, rounded = (_run(16, [0], dtype=dtype, size=size) for dtype in (torch.float32, torch.int8))
        assert 0 < (whole - rounded).abs().max() < 0.03
    x = normal(1, 50, 3, 64, scale=5.0)
    caches = cache_pool(4, 3, 16, 64, torch.int8)
    ops.cache_write(x, x, **caches, slots=torch.arange(50))
    k = (caches["k_cache"] * caches["k_scale"].unsqueeze(2)).permute(0, 3, 1, 2).reshape(64, 3, 64)[:50]
    v = (caches["v_cache"] * caches["v_scale"].unsqueeze(3)).permute(0, 2, 1, 3).reshape(64, 3, 64)[:50]
    bound = x.abs().amax(-1, keepdim=True) / 127 * 0.5001
    assert ((k - x).abs() <= bound).all() and ((v - x).abs() <= bound).all()


def test_int4_is_near(path: str) -> None:
    """Half a step of a 15th of each group's range bounds what is stored, beside the rounding of its ends to float16."""
    for size in (16, 34, 64, 256):
        x = normal(1, 50, 3, size, scale=5.0)
        caches = cache_pool(4, 3, 16, size, torch.uint8)
        ops.cache_write(x, x, **caches, slots=torch.arange(50))
        blocks, places = torch.arange(50) // 16, torch.arange(50) % 16
        for found in read_cache(**caches, blocks=blocks, places=places):
            for part, group in zip(found.split(32, -1), x.split(32, -1)):
                span = group.amax(-1, keepdim=True) - group.amin(-1, keepdim=True)
                assert ((part - group).abs() <= span / 15 * 0.501 + 2e-3 * group.abs().amax()).all()


def test_a_table_that_leads_nowhere_is_refused(path: str) -> None:
    for length in (40, 700):
        for bad in (-1, 10**6):
            example = paged(1, [(1, length)], 2, 1, 16)
            example["table"][0, length // 32] = bad
            with pytest.raises(IndexError):
                ops.attention(**example)
        example = paged(1, [(1, length)], 2, 1, 16)
        example["table"] = example["table"][:, :2]
        with pytest.raises(IndexError):
            ops.attention(**example)


def test_caches_that_do_not_fit_are_refused() -> None:
    example = paged(1, [(1, 40)], 2, 1, 24, dtype=torch.int8)
    for change in (
        {"k_scale": None},
        {"v_scale": example["v_scale"].double()},
        {"v_cache": example["k_cache"]},
        {"k_cache": example["k_cache"].float()},
        {"q": normal(1, 1, 2, 8)},
    ):
        with pytest.raises(ValueError, match="cache"):
            ops.attention(**(example | change))


def test_indices_out_of_range_are_refused(path: str) -> None:
    panels = ops.pack_panels(normal(0, 16, 8))
    caches: dict[str, Any] = cache_pool(4, 1, 4, 8, torch.float32)
    k, qkv, at = normal(1, 1, 1, 8), normal(1, 1, 24), torch.tensor([0])
    angles = torch.ones(16, 4)
    for bad in (torch.tensor([-1]), torch.tensor([16])):
        with pytest.raises(IndexError):
            ops.embedding(bad, panels, 8)
        with pytest.raises(IndexError):
            ops.cache_write(k, k, **caches, slots=bad)
        with pytest.raises(IndexError):
            ops.rope(k, bad, angles, angles)
        with pytest.raises(IndexError):
            ops.qkv_write(qkv, **caches, slots=bad, positions=at)
        with pytest.raises(IndexError):
            ops.qkv_write(qkv, **caches, slots=at, positions=bad, cos=angles, sin=angles)
    assert not caches["k_cache"].any() and not caches["v_cache"].any()
