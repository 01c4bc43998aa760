from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.report import NO_TOKEN, NUM_REPORTED, report
from penstock.ops.sample import PIECE
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.search import LOWEST, PIVOTS, above, gathered, nth_equal, reaching
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.wishes import MOST_LOGPROBS, NUM_LOGPROBS, NUM_WISHES, ROOM

_NUM_WISHES, _NUM_LOGPROBS, _NUM_REPORTED = (
    tl.constexpr(NUM_WISHES),
    tl.constexpr(NUM_LOGPROBS),
    tl.constexpr(NUM_REPORTED),
)
_MOST, _NO_TOKEN = tl.constexpr(MOST_LOGPROBS), tl.constexpr(NO_TOKEN)
PARTS = 4
BLOCK = 512


@triton.jit
def _told(
    logits,
    tokens,
    rows,
    numbers,
    tops,
    sums,
    ranks,
    heads,
    row_stride,
    size,
    num_pieces,
    PIECE: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Of one piece of one row that asks: the largest logit, the sum of the weights relative to it, how many tokens come
    before the chosen one, and the largest logit of each part."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    if tl.load(numbers + entry * _NUM_WISHES + _NUM_LOGPROBS) > 0:
        token = piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(logits + row * row_stride + token, mask=token < size, other=LOWEST).to(tl.float32)
        chosen = tl.maximum(tl.load(tokens + row), 0)
        mine = tl.load(logits + row * row_stride + chosen).to(tl.float32)
        top = tl.max(x, 0)
        base = tl.where(top == LOWEST, 0.0, top)
        before = ((x > mine) | (x == mine) & (token < chosen)) & (token < size)
        at = row * num_pieces + piece
        tl.store(tops + at, top)
        tl.store(sums + at, tl.sum(tl.exp(x - base), 0))
        tl.store(ranks + at, tl.sum(before.to(tl.int32), 0))
        part = tl.arange(0, PARTS)
        tl.store(heads + at * PARTS + part, tl.max(tl.reshape(x, (PARTS, PIECE // PARTS)), 1))


@triton.jit
def _listed(
    values,
    ids,
    count,
    wanted,
    size,
    found,
    found_ids,
    top,
    MOST: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the `wanted` likeliest of values[count] and their tokens, one after the other; how many there are."""
    at = tl.arange(0, BLOCK)
    bound = reaching(values, count, wanted, tl.where(True, LOWEST, top), top, 0.0, 0.0, True, PIVOTS, BLOCK)
    more, mass, equal = above(values, count, bound, top, 0.0, 0.0, BLOCK)
    last = nth_equal(values, ids, count, bound, (wanted - more).to(tl.int32), 0, BLOCK)
    last = tl.where(last < 0, size, last)  # fewer than wanted are possible
    written = count * 0
    for start in range(0, count, BLOCK):
        inside = start + at < count
        x = tl.load(values + start + at, mask=inside, other=LOWEST)
        token = tl.load(ids + start + at, mask=inside, other=size)
        fits = ((x > bound) | (x == bound) & (token <= last)) & inside
        to = written + tl.cumsum(fits.to(tl.int32), 0) - 1
        tl.store(found + to, x, mask=fits & (to < MOST))
        tl.store(found_ids + to, token.to(tl.float32), mask=fits & (to < MOST))
        written += tl.sum(fits.to(tl.int32), 0)
    tl.debug_barrier()
    return written


@triton.jit
def _one_by_one(values, wanted, size, found, found_ids, BLOCK: tl.constexpr):
    """The same over a whole row, each the likeliest of those after the one before; for rows with very many equals."""
    at = tl.arange(0, BLOCK)
    written = size * 0
    value, last = tl.where(True, float("inf"), wanted), size * 0 - 1
    for _ in range(0, wanted.to(tl.int32)):
        best, where = tl.where(True, LOWEST, value), size
        for start in range(0, size, BLOCK):
            token = start + at
            x = tl.load(values + token, mask=token < size, other=LOWEST).to(tl.float32)
            x = tl.where((x < value) | (x == value) & (token > last), x, LOWEST)
            here = tl.max(x, 0)
            if here > best:
                best = here
                where = tl.min(tl.where(x == here, token, size), 0)
        if best > LOWEST:
            tl.store(found + written, best)
            tl.store(found_ids + written, where.to(tl.float32))
            written += 1
        value, last = best, where
    tl.debug_barrier()
    return written


@triton.jit
def _report(
    logits,
    tokens,
    rows,
    numbers,
    tops,
    sums,
    ranks,
    heads,
    near,
    near_ids,
    out,
    row_stride,
    size,
    num_pieces,
    num_heads,
    ROOM: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + row).to(tl.int64)
    wanted = tl.load(numbers + entry * _NUM_WISHES + _NUM_LOGPROBS) - 1
    if wanted >= 0:
        at = tl.arange(0, PIECES)
        inside = at < num_pieces
        piece_tops = tl.load(tops + row * num_pieces + at, mask=inside, other=LOWEST)
        top = tl.max(piece_tops, 0)
        piece_sums = tl.load(sums + row * num_pieces + at, mask=inside, other=0.0)
        level = top + tl.log(tl.sum(piece_sums * tl.exp(piece_tops - top), 0))
        rank = 1 + tl.sum(tl.load(ranks + row * num_pieces + at, mask=inside, other=0), 0)
        chosen = tl.maximum(tl.load(tokens + row), 0)
        line = out + row * _NUM_REPORTED
        tl.store(line, tl.load(logits + row * row_stride + chosen).to(tl.float32) - level)
        tl.store(line + 1, rank.to(tl.float32))
        count = size * 0
        found_ids, found = line + 2, line + 2 + _MOST
        if (wanted > 0) & (top > LOWEST) & (top < float("inf")):
            floor = tl.where(True, LOWEST, top)
            if wanted <= num_heads:
                floor = reaching(heads + row * num_heads, num_heads, wanted, floor, top, 0.0, 0.0, True, PIVOTS, BLOCK)
            values = logits + row * row_stride
            row_near, row_ids = near + row * ROOM, near_ids + row * ROOM
            num = gathered(
                values, tops + row * num_pieces, num_pieces, size, floor, row_near, row_ids, ROOM, PIECE, BLOCK
            )
            if num <= ROOM:
                count = _listed(row_near, row_ids, num, wanted, size, found, found_ids, top, _MOST, PIVOTS, BLOCK)
            else:
                count = _one_by_one(values, wanted, size, found, found_ids, PIECE)
        count = tl.minimum(count, _MOST)
        some = tl.arange(0, _MOST)
        x = tl.load(found + some, mask=some < count, other=LOWEST)
        token = tl.load(found_ids + some, mask=some < count, other=16777216.0 + 2.0 * some)
        tl.debug_barrier()
        first = (x[None, :] > x[:, None]) | (x[None, :] == x[:, None]) & (token[None, :] < token[:, None])
        place = tl.sum(first.to(tl.int32), 1)
        there = some < count
        tl.store(found + place, tl.where(there, x - level, 0.0))
        tl.store(found_ids + place, tl.where(there, token, _NO_TOKEN))


@report.impl("cuda", exact=True)
def _body(
    logits: Tensor, tokens: Tensor, rows: Tensor, numbers: Tensor, room: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    num_rows, size = logits.shape
    out = torch.zeros((num_rows, NUM_REPORTED), device=logits.device)
    if not num_rows:
        return out
    num_pieces = cdiv(size, PIECE)
    tops = torch.empty((num_rows, num_pieces), device=logits.device)
    sums = torch.empty((num_rows, num_pieces), device=logits.device)
    ranks = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    heads = torch.empty((num_rows, num_pieces * PARTS), device=logits.device)
    if room is None or len(room[0]) < num_rows:
        room = (
            torch.empty((num_rows, ROOM), device=logits.device),
            torch.empty((num_rows, ROOM), dtype=torch.int32, device=logits.device),
        )
    _told[(num_rows, num_pieces)](
        logits,
        tokens,
        rows,
        numbers,
        tops,
        sums,
        ranks,
        heads,
        logits.stride(0),
        size,
        num_pieces,
        PIECE,
        PARTS,
        num_warps=8,
        **early(logits),
    )
    _report[(num_rows,)](
        logits,
        tokens,
        rows,
        numbers,
        tops,
        sums,
        ranks,
        heads,
        *room,
        out,
        logits.stride(0),
        size,
        num_pieces,
        num_pieces * PARTS,
        ROOM,
        PIECE,
        power_of_2(num_pieces),
        PIVOTS,
        BLOCK,
        num_warps=8,
        **early(logits),
    )
    return out
