"""Low-rank additions: rows sorted by adapter once a step, then two kernels a linear. Every sum has one order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.lora_stacks import AdapterRows, LoraStacks, add_lora_columns, add_lora_stacks
from penstock.ops.triton.experts.sort import SortedPairs, sort_pairs
from penstock.ops.triton.launch import (
    dot_precision,
    has_large_smem,
    outlast_previous,
    pdl_options,
    start_beside_previous,
    wait_for_previous,
)
from penstock.ops.triton.matmul.chain import sum_chain
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import LORA_TILE_OUTPUTS, MAX_FEW_LORA_ROWS, lora_split, lora_tile_rows


class Adapters(NamedTuple):
    """The slots of one linear as kernels take them."""

    a: Any
    b: Any
    scales: Any
    slot_values: int  # from a slot's a or b to that of the next
    slot_scales: int
    bounds: tuple[int, ...]  # first output of each part but the first


@triton.jit
def _load_tile(tiles):
    """Load the slot of this program's tile, its first row in the order and how many it has, past L1."""
    tile = tiles + 3 * tl.program_id(0)
    slot, first = tl.load(tile, cache_modifier=".cg"), tl.load(tile + 1, cache_modifier=".cg")
    return slot, first, tl.load(tile + 2, cache_modifier=".cg")


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    x,
    adapters,
    order,
    tiles,
    inner,
    x_row,
    num_rows,
    num_inner,
    width,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """inner[split, T, P · R] = scale · a · x for rows of one adapter, over SHARE of the inputs or, one after the other,
    over SPLITS such shares: the same sums in the same order. BESIDE: the previous kernel is the linear's product, which
    reads the same rows."""
    if BESIDE:
        start_beside_previous(PDL)
    else:
        wait_for_previous(PDL)
    split = tl.program_id(2)
    slot, first, count = _load_tile(tiles)
    if count * (slot + 1) > 0:
        r, n = tl.arange(0, ROWS), tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        row = tl.load(order + first + r, mask=r < count, other=0, cache_modifier=".cg").to(tl.int64)
        own, line = tl.minimum(n, num_inner - 1), slot.to(tl.int64)
        scale = tl.load(adapters.scales + line * adapters.slot_scales + own, cache_modifier=".cg")[:, None]
        weights = adapters.a + line * adapters.slot_values + own.to(tl.int64) * width
        total = tl.zeros((OUTS, ROWS), tl.float32)
        for i in range(SPLITS):
            first_input = (split * SPLITS + i) * SHARE
            sums = sum_chain(
                weights + first_input,
                x + row * x_row + first_input,
                r < count,
                tl.minimum(width - first_input, SHARE),
                OUTS,
                ROWS,
                BLOCK,
                EVEN,
                STAGES,
                PRECISION,
                ".cg",
            )
            total += sums * scale
        place = inner + (split.to(tl.int64) * num_rows + row)[None, :] * num_inner + n[:, None]
        tl.store(place, total, mask=(r < count)[None, :] & (n < num_inner)[:, None])
    if BESIDE:
        outlast_previous(PDL)


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    inner,
    adapters,
    order,
    tiles,
    y,
    y_row,
    num_rows,
    num_out,
    num_inner,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += b · inner, where an output takes the inner values of its part alone. EARLY: rows were sorted for a linear
    before this one, so that b is read before the wait."""
    if not EARLY:
        wait_for_previous(PDL)
    slot, first, count = _load_tile(tiles)
    r, k, n = tl.arange(0, ROWS), tl.arange(0, INNER), tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    row = tl.load(order + first + r, mask=r < count, other=0, cache_modifier=".cg").to(tl.int64)
    part = n * 0
    for i in tl.static_range(len(adapters.bounds)):
        part += (n >= adapters.bounds[i]).to(tl.int32)
    num_wanted = count * (slot + 1)
    begin = tl.maximum(slot, 0).to(tl.int64) * adapters.slot_values
    line = begin + n.to(tl.int64)[:, None] * RANK + (k % RANK)[None, :]
    own = (n < tl.where(num_wanted > 0, num_out, 0))[:, None] & ((k // RANK)[None, :] == part[:, None])
    b = tl.load(adapters.b + line, mask=own, other=0.0)
    if EARLY:
        wait_for_previous(PDL)
    if num_wanted > 0:
        values = tl.zeros((ROWS, INNER), tl.float32)
        wanted = (r < count)[:, None] & (k < num_inner)[None, :]
        for split in tl.static_range(SPLITS):
            values += tl.load(
                inner + (split * num_rows + row)[:, None] * num_inner + k[None, :], mask=wanted, other=0.0
            )
        delta = tl.dot(b, tl.trans(values.to(b.dtype)), input_precision=PRECISION)
        place, inside = y + row[None, :] * y_row + n[:, None], (r < count)[None, :] & (n < num_out)[:, None]
        before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (before + delta).to(y.dtype.element_ty), mask=inside)


def _sort(rows: AdapterRows, num_slots: int, tile_rows: int) -> SortedPairs:
    if "sorted" not in rows.cached:
        rows.cached["sorted"] = sort_pairs(rows.slots.contiguous().view(-1, 1), num_slots, tile_rows)
    found: SortedPairs = rows.cached["sorted"]
    return found


def _find_room(rows: AdapterRows, shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, bool]:
    """Return a buffer for inner values that the linears of a step share, and whether one before this used it. A new
    buffer may be memory that the previous kernel still reads."""
    name = f"inner {shape}"
    is_known = name in rows.cached
    if not is_known:
        rows.cached[name] = torch.empty(shape, device=device)
    return rows.cached[name], is_known


def _adapters(weights: LoraStacks) -> Adapters:
    a, b, scales = weights.a, weights.b, weights.scales
    return Adapters(a, b, scales, a.stride(0), scales.stride(0), weights.bounds[1:-1])


def _add(
    inner: Tensor, y: Tensor, rows: AdapterRows, weights: LoraStacks, tile_rows: int, is_early: bool = False
) -> Tensor:
    """Add what inner[splits, T, P · R] expands to."""
    num_splits, num_rows, num_inner = inner.shape
    order, tiles = _sort(rows, len(weights.a), tile_rows)
    _expand[(len(tiles), cdiv(weights.num_out, LORA_TILE_OUTPUTS))](
        inner,
        _adapters(weights),
        order,
        tiles,
        y,
        y.stride(0),
        num_rows,
        weights.num_out,
        num_inner,
        weights.rank,
        num_splits,
        LORA_TILE_OUTPUTS,
        tile_rows,
        max(16, power_of_2(num_inner)),
        dot_precision(weights.a.dtype),
        is_early,
        num_warps=4,
        enable_fp_fusion=False,
        **pdl_options(y),
    )
    return y


@add_lora_stacks.impl("cuda", exact=True)
def _body(x: Tensor, y: Tensor, rows: AdapterRows, weights: LoraStacks) -> Tensor:
    num_rows, width = x.shape
    if not num_rows:
        return y
    given, x = x, (x if x.stride(1) == 1 else x.contiguous()).to(weights.a.dtype)
    tile_rows, num_inner = lora_tile_rows(num_rows), weights.a.shape[1]
    block = 128 if x.itemsize == 2 else 32
    share, num_splits = lora_split(width, block)
    num_side_by_side = num_splits if num_rows <= MAX_FEW_LORA_ROWS else 1
    was_sorted = "sorted" in rows.cached
    inner, is_known = _find_room(rows, (num_side_by_side, num_rows, num_inner), x.device)
    order, tiles = _sort(rows, len(weights.a), tile_rows)
    _shrink[(len(tiles), cdiv(num_inner, 16), num_side_by_side)](
        x,
        _adapters(weights),
        order,
        tiles,
        inner,
        x.stride(0),
        num_rows,
        num_inner,
        width,
        16,
        tile_rows,
        share,
        num_splits // num_side_by_side,
        block,
        width % block == 0,
        4 if has_large_smem(x.device) else 2,
        dot_precision(weights.a.dtype),
        was_sorted and is_known and x is given,
        num_warps=4,
        enable_fp_fusion=False,
        **pdl_options(x),
    )
    return _add(inner, y, rows, weights, tile_rows, was_sorted)


@add_lora_columns.impl("cuda", exact=True)
def _columns_body(ids: Tensor, y: Tensor, rows: AdapterRows, weights: LoraStacks) -> Tensor:
    if not len(ids):
        return y
    slots = rows.slots.clamp(min=0).long()
    inner = weights.a[slots, ids].float() * weights.scales[slots]
    return _add(inner.unsqueeze(0), y, rows, weights, lora_tile_rows(len(ids)))
