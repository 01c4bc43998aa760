from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.sampling.report import LIST_END, NUM_REPORTED, report
from penstock.ops.sampling.row_params import MAX_CANDIDATES, MAX_LOGPROBS, NUM_LOGPROBS, NUM_PARAMS
from penstock.ops.sampling.sample import VOCAB_TILE
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.sampling.search import LOWEST, count_above, find_nth_equal, find_threshold, gather_candidates
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import SAMPLING_BLOCK, SAMPLING_PARTS, SAMPLING_PIVOTS

_NUM_PARAMS, _NUM_LOGPROBS, _NUM_REPORTED = (
    tl.constexpr(NUM_PARAMS),
    tl.constexpr(NUM_LOGPROBS),
    tl.constexpr(NUM_REPORTED),
)
_MAX_LOGPROBS, _LIST_END = tl.constexpr(MAX_LOGPROBS), tl.constexpr(LIST_END)


@triton.jit
def _reduce_logprobs(
    logits,
    tokens,
    rows,
    numbers,
    tops,
    sums,
    ranks,
    maxima,
    row_stride,
    size,
    num_tiles,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce a tile of a row that asks for log probabilities.

    It stores the largest logit, the sum of weights relative to it, the number of tokens that rank before the chosen
    one, and the largest logit of each part.
    """
    wait_for_previous(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(rows + row).to(tl.int64)
    if tl.load(numbers + entry * _NUM_PARAMS + _NUM_LOGPROBS) > 0:
        token = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * row_stride + token, mask=token < size, other=LOWEST).to(tl.float32)
        chosen = tl.maximum(tl.load(tokens + row), 0)
        mine = tl.load(logits + row * row_stride + chosen).to(tl.float32)
        top = tl.max(x, 0)
        base = tl.where(top == LOWEST, 0.0, top)
        before = ((x > mine) | (x == mine) & (token < chosen)) & (token < size)
        at = row * num_tiles + tile
        tl.store(tops + at, top)
        tl.store(sums + at, tl.sum(tl.exp(x - base), 0))
        tl.store(ranks + at, tl.sum(before.to(tl.int32), 0))
        part = tl.arange(0, PARTS)
        tl.store(maxima + at * PARTS + part, tl.max(tl.reshape(x, (PARTS, TILE // PARTS)), 1))


@triton.jit
def _list_likeliest(
    values,
    ids,
    count,
    wanted,
    size,
    found,
    found_ids,
    top,
    MAX_LISTED: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the `wanted` likeliest of values[count] and their tokens; return how many there are."""
    at = tl.arange(0, BLOCK)
    bound = find_threshold(values, count, wanted, tl.where(True, LOWEST, top), top, 0.0, 0.0, True, PIVOTS, BLOCK)
    more, mass, equal = count_above(values, count, bound, top, 0.0, 0.0, BLOCK)
    last = find_nth_equal(values, ids, count, bound, (wanted - more).to(tl.int32), 0, BLOCK)
    last = tl.where(last < 0, size, last)  # fewer than wanted are possible
    written = count * 0
    for start in range(0, count, BLOCK):
        inside = start + at < count
        x = tl.load(values + start + at, mask=inside, other=LOWEST)
        token = tl.load(ids + start + at, mask=inside, other=size)
        fits = ((x > bound) | (x == bound) & (token <= last)) & inside
        to = written + tl.cumsum(fits.to(tl.int32), 0) - 1
        tl.store(found + to, x, mask=fits & (to < MAX_LISTED))
        tl.store(found_ids + to, token.to(tl.float32), mask=fits & (to < MAX_LISTED))
        written += tl.sum(fits.to(tl.int32), 0)
    tl.debug_barrier()
    return written


@triton.jit
def _list_one_by_one(values, wanted, size, found, found_ids, BLOCK: tl.constexpr):
    """Do what `_list_likeliest` does over a whole row, one pass per token: for rows with very many equal logits."""
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
    maxima,
    candidates,
    candidate_ids,
    out,
    row_stride,
    size,
    num_tiles,
    num_maxima,
    MAX_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the log probability and rank of a row's token, and the likeliest tokens, sorted."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows + row).to(tl.int64)
    wanted = tl.load(numbers + entry * _NUM_PARAMS + _NUM_LOGPROBS) - 1
    if wanted >= 0:
        at = tl.arange(0, TILES)
        inside = at < num_tiles
        tile_tops = tl.load(tops + row * num_tiles + at, mask=inside, other=LOWEST)
        top = tl.max(tile_tops, 0)
        tile_sums = tl.load(sums + row * num_tiles + at, mask=inside, other=0.0)
        level = top + tl.log(tl.sum(tile_sums * tl.exp(tile_tops - top), 0))
        rank = 1 + tl.sum(tl.load(ranks + row * num_tiles + at, mask=inside, other=0), 0)
        chosen = tl.maximum(tl.load(tokens + row), 0)
        line = out + row * _NUM_REPORTED
        tl.store(line, tl.load(logits + row * row_stride + chosen).to(tl.float32) - level)
        tl.store(line + 1, rank.to(tl.float32))
        count = size * 0
        found_ids, found = line + 2, line + 2 + _MAX_LOGPROBS
        if (wanted > 0) & (top > LOWEST) & (top < float("inf")):
            floor = tl.where(True, LOWEST, top)
            if wanted <= num_maxima:
                floor = find_threshold(
                    maxima + row * num_maxima, num_maxima, wanted, floor, top, 0.0, 0.0, True, PIVOTS, BLOCK
                )
            values = logits + row * row_stride
            row_candidates, row_ids = candidates + row * MAX_CANDIDATES, candidate_ids + row * MAX_CANDIDATES
            num = gather_candidates(
                values,
                tops + row * num_tiles,
                num_tiles,
                size,
                floor,
                row_candidates,
                row_ids,
                MAX_CANDIDATES,
                TILE,
                BLOCK,
            )
            if num <= MAX_CANDIDATES:
                count = _list_likeliest(
                    row_candidates, row_ids, num, wanted, size, found, found_ids, top, _MAX_LOGPROBS, PIVOTS, BLOCK
                )
            else:
                count = _list_one_by_one(values, wanted, size, found, found_ids, TILE)
        count = tl.minimum(count, _MAX_LOGPROBS)
        some = tl.arange(0, _MAX_LOGPROBS)
        x = tl.load(found + some, mask=some < count, other=LOWEST)
        token = tl.load(found_ids + some, mask=some < count, other=16777216.0 + 2.0 * some)
        tl.debug_barrier()
        first = (x[None, :] > x[:, None]) | (x[None, :] == x[:, None]) & (token[None, :] < token[:, None])
        place = tl.sum(first.to(tl.int32), 1)
        there = some < count
        tl.store(found + place, tl.where(there, x - level, 0.0))
        tl.store(found_ids + place, tl.where(there, token, _LIST_END))


@report.impl("cuda", exact=True)
def _body(
    logits: Tensor, tokens: Tensor, rows: Tensor, numbers: Tensor, room: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    num_rows, size = logits.shape
    out = torch.zeros((num_rows, NUM_REPORTED), device=logits.device)
    if not num_rows:
        return out
    num_tiles = cdiv(size, VOCAB_TILE)
    tops = torch.empty((num_rows, num_tiles), device=logits.device)
    sums = torch.empty((num_rows, num_tiles), device=logits.device)
    ranks = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    maxima = torch.empty((num_rows, num_tiles * SAMPLING_PARTS), device=logits.device)
    if room is None or len(room[0]) < num_rows:
        room = (
            torch.empty((num_rows, MAX_CANDIDATES), device=logits.device),
            torch.empty((num_rows, MAX_CANDIDATES), dtype=torch.int32, device=logits.device),
        )
    _reduce_logprobs[(num_rows, num_tiles)](
        logits,
        tokens,
        rows,
        numbers,
        tops,
        sums,
        ranks,
        maxima,
        logits.stride(0),
        size,
        num_tiles,
        VOCAB_TILE,
        SAMPLING_PARTS,
        num_warps=8,
        **pdl_options(logits),
    )
    _report[(num_rows,)](
        logits,
        tokens,
        rows,
        numbers,
        tops,
        sums,
        ranks,
        maxima,
        *room,
        out,
        logits.stride(0),
        size,
        num_tiles,
        num_tiles * SAMPLING_PARTS,
        MAX_CANDIDATES,
        VOCAB_TILE,
        power_of_2(num_tiles),
        SAMPLING_PIVOTS,
        SAMPLING_BLOCK,
        num_warps=8,
        **pdl_options(logits),
    )
    return out
