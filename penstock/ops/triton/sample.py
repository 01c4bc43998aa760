from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.sample import BAD, GOLDEN, PIECE, sample
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import mixed

_BAD, _GOLDEN = tl.constexpr(BAD), tl.constexpr(GOLDEN)


@triton.jit
def _pieces(logits, temperature, rows, tops, sums, places, row_stride, size, num_pieces, PIECE: tl.constexpr,
            EARLY: tl.constexpr):
    """Of one piece of one row the largest logit, where it first is, and the sum of the weights relative to it."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * row_stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
    entry = row
    if rows is not None:
        entry = tl.load(rows + row).to(tl.int64)
    heat = tl.load(temperature + entry)
    heat = tl.where(heat > 0, heat, 1.0)
    broken = tl.max((x != x).to(tl.int32), 0)
    top = tl.max(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp((x - base) / heat), 0)
    place = tl.min(tl.where(x == top, token, 2147483647), 0)
    top = tl.where((broken > 0) | (top == float("inf")), float("nan"), top)
    at = row * num_pieces + piece
    tl.store(tops + at, top)
    tl.store(sums + at, total)
    tl.store(places + at, place)


@triton.jit
def _crossing(weights, share):
    """The first place at which the running sum of weights exceeds that share of the whole."""
    sums = tl.cumsum(weights, 0)
    whole = tl.max(sums, 0)
    after = tl.sum((sums <= share * whole).to(tl.int32), 0)
    return tl.minimum(after, tl.sum((sums < whole).to(tl.int32), 0))


@triton.jit
def _choose(logits, temperature, keys, positions, rows, last, tops, sums, places, out, row_stride, size, num_pieces,
            PIECE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    entry = row
    if rows is not None:
        entry = tl.load(rows + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < num_pieces
    top = tl.load(tops + row * num_pieces + at, mask=inside, other=float("-inf"))
    broken = tl.max((top != top).to(tl.int32), 0)
    largest = tl.max(top, 0)
    heat = tl.load(temperature + entry)
    if (broken > 0) | (largest == float("-inf")):
        token = largest.to(tl.int64) * 0 + _BAD
    elif heat > 0:
        key, position = tl.load(keys + entry), tl.load(positions + row).to(tl.uint32)
        first = mixed(key.to(tl.uint32) ^ mixed(position))
        second = mixed(mixed((key >> 32).to(tl.uint32) ^ mixed(position + _GOLDEN)) ^ first)
        weight = tl.load(sums + row * num_pieces + at, mask=inside, other=0.0) * tl.exp((top - largest) / heat)
        piece = _crossing(weight, (first >> 8).to(tl.float32) * 5.9604644775390625e-08)
        some = piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(logits + row * row_stride + some, mask=some < size, other=float("-inf")).to(tl.float32)
        within = tl.exp((x - tl.max(x, 0)) / heat)
        token = (piece * PIECE + _crossing(within, (second >> 8).to(tl.float32) * 5.9604644775390625e-08)).to(tl.int64)
    else:
        place = tl.load(places + row * num_pieces + at, mask=inside, other=2147483647)
        token = tl.min(tl.where(top == largest, place, 2147483647), 0).to(tl.int64)
    tl.store(out + row, token)
    if last is not None:
        tl.store(last + entry, token)


@sample.impl("cuda", exact=True)
def _body(logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor, rows: Tensor | None = None,
          last: Tensor | None = None) -> Tensor:
    num_rows, size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    num_pieces = triton.cdiv(size, PIECE)
    tops = torch.empty((num_rows, num_pieces), device=logits.device)
    sums = torch.empty((num_rows, num_pieces), device=logits.device)
    places = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    _pieces[(num_rows, num_pieces)](logits, temperature, rows, tops, sums, places, logits.stride(0), size, num_pieces,
                                    PIECE, num_warps=8, **early(logits))
    _choose[(num_rows,)](logits, temperature, keys, positions, rows, last, tops, sums, places, out, logits.stride(0),
                         size, num_pieces, PIECE, triton.next_power_of_2(num_pieces), num_warps=8, **early(logits))
    return out
