from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.sample import BAD, sample
from penstock.ops.triton.numbers import mixed

PIECE = 4096
_BAD = tl.constexpr(BAD)


@triton.jit
def _pieces(logits, temperature, keys, positions, rows, tops, places, row_stride, size, num_pieces,
            PIECE: tl.constexpr):
    """The token of one piece of one row that comes first; NaN if the piece has one."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * row_stride + token, mask=token < size, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 0)
    largest = tl.max(x, 0)
    entry = row
    if rows is not None:
        entry = tl.load(rows + row).to(tl.int64)
    warmth = tl.load(temperature + entry)
    if warmth > 0:
        key = tl.load(keys + entry)
        position = tl.load(positions + row).to(tl.uint32)
        first = mixed(key.to(tl.uint32) ^ mixed(position))
        second = mixed((key >> 32).to(tl.uint32) ^ mixed(position + 0x9E3779B9))
        share = (mixed(mixed(token.to(tl.uint32) ^ first) ^ second).to(tl.float32) + 0.5) * 2.3283064365386963e-10
        share = tl.minimum(share, 0.99999994)
        # log1p(-share), exact where share is small
        rest = 1.0 - share
        wait = tl.where(rest == 1.0, share, -tl.log(rest) * share / (1.0 - rest))
        x = x / warmth - tl.log(wait)
    top = tl.max(x, 0)
    place = tl.min(tl.where(x == top, token, 2147483647), 0)
    at = row * num_pieces + piece
    if broken > 0 or largest == float("inf"):
        top = float("nan")
    elif largest == float("-inf"):
        top = float("-inf")
    tl.store(tops + at, top)
    tl.store(places + at, place)


@triton.jit
def _first(tops, places, rows, last, out, num_pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    top = tl.load(tops + row * num_pieces + at, mask=at < num_pieces, other=float("-inf"))
    place = tl.load(places + row * num_pieces + at, mask=at < num_pieces, other=2147483647)
    broken = tl.max((top != top).to(tl.int32), 0)
    largest = tl.max(top, 0)
    token = tl.min(tl.where(top == largest, place, 2147483647), 0).to(tl.int64)
    if broken > 0 or largest == float("-inf"):
        token = token * 0 + _BAD
    tl.store(out + row, token)
    if last is not None:
        tl.store(last + tl.load(rows + row).to(tl.int64), token)


@sample.impl("cuda", exact=True)
def _body(logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor, rows: Tensor | None = None,
          last: Tensor | None = None) -> Tensor:
    num_rows, size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    num_pieces = triton.cdiv(size, PIECE)
    tops = torch.empty((num_rows, num_pieces), device=logits.device)
    places = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    _pieces[(num_rows, num_pieces)](logits, temperature, keys, positions, rows, tops, places, logits.stride(0), size,
                                    num_pieces, PIECE, num_warps=8)
    _first[(num_rows,)](tops, places, rows, last, out, num_pieces, triton.next_power_of_2(num_pieces), num_warps=1)
    return out
