from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.extras import Extras
from penstock.ops.sample import BAD, GOLDEN, NOTHING, PIECE, sample
from penstock.ops.triton.cut import cut, cut_sums, within
from penstock.ops.triton.edit import edit
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import mixed
from penstock.ops.triton.samplers import PARTS, Reshaping
from penstock.ops.triton.search import LOWEST, PIVOTS
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.wishes import FREQUENCY, MOST_COUNTED, NUM_WISHES, PRESENCE, REPETITION, ROOM, Wishes

_BAD, _NOTHING, _GOLDEN = tl.constexpr(BAD), tl.constexpr(NOTHING), tl.constexpr(GOLDEN)
_REPETITION, _FREQUENCY, _PRESENCE = tl.constexpr(REPETITION), tl.constexpr(FREQUENCY), tl.constexpr(PRESENCE)
_MOST_COUNTED, _NUM_WISHES = tl.constexpr(MOST_COUNTED), tl.constexpr(NUM_WISHES)
NOWHERE = tl.constexpr(2147483647)
BLOCK = 512  # values looked at together where few are


@triton.jit
def _pieces(
    logits,
    temperature,
    rows,
    tops,
    sums,
    places,
    numbers,
    counts,
    words,
    biased,
    bias,
    edited,
    heads,
    row_stride,
    size,
    num_pieces,
    PIECE: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Of one piece of one row the largest logit, where it first is, and the sum of the weights relative to it; where
    rows have wishes, these come first and what they make of the logits is kept."""
    await_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * row_stride + token, mask=token < size, other=LOWEST).to(tl.float32)
    entry = row
    if rows is not None:
        entry = tl.load(rows + row).to(tl.int64)
    heat = tl.load(temperature + entry)
    heat = tl.where(heat > 0, heat, 1.0)
    raw_top = tl.max(x, 0)
    broken = (tl.max((x != x).to(tl.int32), 0) > 0) | (raw_top == float("inf"))
    if numbers is not None:
        x = edit(x, token, size, entry, numbers, counts, words, biased, bias)
        tl.store(edited + row * size + token, x, mask=token < size)
    top = tl.max(x, 0)
    base = tl.where(top == LOWEST, 0.0, top)
    total = tl.sum(tl.exp((x - base) / heat), 0)
    place = tl.min(tl.where(x == top, token, NOWHERE), 0)
    at = row * num_pieces + piece
    tl.store(tops + at, tl.where(broken, float("nan"), top))
    tl.store(sums + at, total)
    tl.store(places + at, tl.where(raw_top == LOWEST, NOWHERE, place))
    if heads is not None:
        part = tl.arange(0, PARTS)
        tl.store(heads + at * PARTS + part, tl.max(tl.reshape(x, (PARTS, PIECE // PARTS)), 1))


@triton.jit
def _crossing(weights, share):
    """The first place at which the running sum of weights exceeds that share of the whole."""
    sums = tl.cumsum(weights, 0)
    whole = tl.max(sums, 0)
    after = tl.sum((sums <= share * whole).to(tl.int32), 0)
    return tl.minimum(after, tl.sum((sums < whole).to(tl.int32), 0))


@triton.jit
def _choose(
    logits,
    temperature,
    keys,
    positions,
    rows,
    last,
    tops,
    sums,
    places,
    numbers,
    counts,
    bounds,
    lasts,
    out,
    row_stride,
    size,
    num_pieces,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    entry = row
    if rows is not None:
        entry = tl.load(rows + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < num_pieces
    top = tl.load(tops + row * num_pieces + at, mask=inside, other=LOWEST)
    broken = tl.max((top != top).to(tl.int32), 0)
    largest = tl.max(top, 0)
    place = tl.load(places + row * num_pieces + at, mask=inside, other=NOWHERE)
    heat = tl.load(temperature + entry)
    if (broken > 0) | (tl.min(place, 0) == NOWHERE):
        token = largest.to(tl.int64) * 0 + _BAD
    elif largest == LOWEST:
        token = largest.to(tl.int64) * 0 + _NOTHING
    elif heat > 0:
        key, position = tl.load(keys + entry), tl.load(positions + row).to(tl.uint32)
        first = mixed(key.to(tl.uint32) ^ mixed(position))
        second = mixed(mixed((key >> 32).to(tl.uint32) ^ mixed(position + _GOLDEN)) ^ first)
        weight = tl.load(sums + row * num_pieces + at, mask=inside, other=0.0) * tl.exp((top - largest) / heat)
        piece = _crossing(weight, (first >> 8).to(tl.float32) * 5.9604644775390625e-08)
        some = piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(logits + row * row_stride + some, mask=some < size, other=LOWEST).to(tl.float32)
        if bounds is not None:
            x = within(x, some, tl.load(bounds + row), tl.load(lasts + row))
        weights = tl.exp((x - tl.max(x, 0)) / heat)
        token = (piece * PIECE + _crossing(weights, (second >> 8).to(tl.float32) * 5.9604644775390625e-08)).to(tl.int64)
    else:
        token = tl.min(tl.where(top == largest, place, NOWHERE), 0).to(tl.int64)
    tl.store(out + row, token)
    if last is not None:
        tl.store(last + entry, token)
    if numbers is not None:
        wish = numbers + entry * _NUM_WISHES
        penal = (tl.load(wish + _REPETITION) != 1) | (tl.load(wish + _FREQUENCY) != 0)
        if (penal | (tl.load(wish + _PRESENCE) != 0)) & (token >= 0):
            count = tl.load(counts + entry * size + token).to(tl.int32)
            tl.store(counts + entry * size + token, tl.minimum(count + 2, _MOST_COUNTED).to(tl.int16))


@sample.impl("cuda", exact=True)
def _body(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    rows: Tensor | None = None,
    last: Tensor | None = None,
    wishes: Wishes | None = None,
    extras: Extras | None = None,
) -> Tensor:
    num_rows, size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    num_pieces = cdiv(size, PIECE)
    tops = torch.empty((num_rows, num_pieces), device=logits.device)
    sums = torch.empty((num_rows, num_pieces), device=logits.device)
    places = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    grid, pieces = (num_rows, num_pieces), power_of_2(num_pieces)
    if wishes is None or rows is None:
        _pieces[grid](
            logits,
            temperature,
            rows,
            tops,
            sums,
            places,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            logits.stride(0),
            size,
            num_pieces,
            PIECE,
            PARTS,
            num_warps=8,
            **early(logits),
        )
        _choose[(num_rows,)](
            logits,
            temperature,
            keys,
            positions,
            rows,
            last,
            tops,
            sums,
            places,
            None,
            None,
            None,
            None,
            out,
            logits.stride(0),
            size,
            num_pieces,
            PIECE,
            pieces,
            num_warps=8,
            **early(logits),
        )
        return out
    numbers, counts, edited = wishes.numbers, wishes.counts, _room(wishes.edited, num_rows)
    near, near_ids = _room(wishes.near, num_rows), _room(wishes.near_ids, num_rows)
    heads = torch.empty((num_rows, num_pieces * PARTS), device=logits.device)
    bounds = torch.empty(num_rows, device=logits.device)
    lasts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    _pieces[grid](
        logits,
        temperature,
        rows,
        tops,
        sums,
        places,
        numbers,
        counts,
        wishes.words,
        wishes.biased,
        wishes.bias,
        edited,
        heads,
        logits.stride(0),
        size,
        num_pieces,
        PIECE,
        PARTS,
        num_warps=8,
        **early(logits),
    )
    heats, step = temperature, None
    if extras is not None:
        step = Reshaping(
            logits,
            temperature,
            keys,
            positions,
            rows,
            wishes,
            extras,
            edited,
            tops,
            sums,
            places,
            heads,
            near,
            near_ids,
            bounds,
            lasts,
        )
        heats = step.before_cut()
    cut[(num_rows,)](
        edited,
        numbers,
        heats,
        rows,
        tops,
        sums,
        heads,
        near,
        near_ids,
        bounds,
        lasts,
        size,
        num_pieces,
        num_pieces * PARTS,
        NUM_WISHES,
        ROOM,
        PIECE,
        pieces,
        PIVOTS,
        BLOCK,
        num_warps=8,
        **early(logits),
    )
    cut_sums[grid](
        edited, heats, rows, tops, sums, bounds, lasts, size, num_pieces, PIECE, num_warps=8, **early(logits)
    )
    if step is not None:
        sums = step.after_cut()
    _choose[(num_rows,)](
        edited,
        heats,
        keys,
        positions,
        rows,
        last,
        tops,
        sums,
        places,
        numbers,
        counts,
        bounds,
        lasts,
        out,
        size,
        size,
        num_pieces,
        PIECE,
        pieces,
        num_warps=8,
        **early(logits),
    )
    if step is not None:
        step.settle(sums, out)
    return out


def _room(room: Tensor, num_rows: int) -> Tensor:
    """Of a workspace the first rows; a larger one where a step has more rows than there are entries."""
    return (
        room if num_rows <= len(room) else torch.empty((num_rows, room.shape[1]), dtype=room.dtype, device=room.device)
    )
