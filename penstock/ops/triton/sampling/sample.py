from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.sampling.extras import Extras
from penstock.ops.sampling.row_params import (
    FREQUENCY,
    MAX_CANDIDATES,
    MAX_COUNTED,
    NUM_PARAMS,
    PRESENCE,
    REPETITION,
    RowParams,
)
from penstock.ops.sampling.sample import BAD, GOLDEN, NOTHING, VOCAB_TILE, sample
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.numbers import mix_bits
from penstock.ops.triton.sampling.cut import apply_cut, cut, cut_sums
from penstock.ops.triton.sampling.edit import edit_logits
from penstock.ops.triton.sampling.samplers import RareSamplers
from penstock.ops.triton.sampling.search import LOWEST, NO_TOKEN
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import SAMPLING_BLOCK, SAMPLING_PARTS, SAMPLING_PIVOTS

_BAD, _NOTHING, _GOLDEN = tl.constexpr(BAD), tl.constexpr(NOTHING), tl.constexpr(GOLDEN)
_REPETITION, _FREQUENCY, _PRESENCE = tl.constexpr(REPETITION), tl.constexpr(FREQUENCY), tl.constexpr(PRESENCE)
_MAX_COUNTED, _NUM_PARAMS = tl.constexpr(MAX_COUNTED), tl.constexpr(NUM_PARAMS)


@triton.jit
def _reduce_tiles(
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
    maxima,
    row_stride,
    size,
    num_tiles,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce a tile to its largest logit, the first token with it, and the sum of weights relative to it.

    With row parameters the logits are edited first, and stored.
    """
    wait_for_previous(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * row_stride + token, mask=token < size, other=LOWEST).to(tl.float32)
    entry = row
    if rows is not None:
        entry = tl.load(rows + row).to(tl.int64)
    temp = tl.load(temperature + entry)
    temp = tl.where(temp > 0, temp, 1.0)
    raw_top = tl.max(x, 0)
    broken = (tl.max((x != x).to(tl.int32), 0) > 0) | (raw_top == float("inf"))
    if numbers is not None:
        x = edit_logits(x, token, size, entry, numbers, counts, words, biased, bias)
        tl.store(edited + row * size + token, x, mask=token < size)
    top = tl.max(x, 0)
    base = tl.where(top == LOWEST, 0.0, top)
    total = tl.sum(tl.exp((x - base) / temp), 0)
    place = tl.min(tl.where(x == top, token, NO_TOKEN), 0)
    at = row * num_tiles + tile
    tl.store(tops + at, tl.where(broken, float("nan"), top))
    tl.store(sums + at, total)
    tl.store(places + at, tl.where(raw_top == LOWEST, NO_TOKEN, place))
    if maxima is not None:
        part = tl.arange(0, PARTS)
        tl.store(maxima + at * PARTS + part, tl.max(tl.reshape(x, (PARTS, TILE // PARTS)), 1))


@triton.jit
def _invert_cdf(weights, share):
    """Return the first index at which the running sum of weights exceeds `share` of their sum."""
    sums = tl.cumsum(weights, 0)
    whole = tl.max(sums, 0)
    after = tl.sum((sums <= share * whole).to(tl.int32), 0)
    return tl.minimum(after, tl.sum((sums < whole).to(tl.int32), 0))


@triton.jit
def _draw(
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
    num_tiles,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw a row's token: a tile by the tiles' sums, then a token of it; with temperature 0 take the argmax."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry = row
    if rows is not None:
        entry = tl.load(rows + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < num_tiles
    top = tl.load(tops + row * num_tiles + at, mask=inside, other=LOWEST)
    broken = tl.max((top != top).to(tl.int32), 0)
    largest = tl.max(top, 0)
    place = tl.load(places + row * num_tiles + at, mask=inside, other=NO_TOKEN)
    temp = tl.load(temperature + entry)
    if (broken > 0) | (tl.min(place, 0) == NO_TOKEN):
        token = largest.to(tl.int64) * 0 + _BAD
    elif largest == LOWEST:
        token = largest.to(tl.int64) * 0 + _NOTHING
    elif temp > 0:
        key, position = tl.load(keys + entry), tl.load(positions + row).to(tl.uint32)
        first = mix_bits(key.to(tl.uint32) ^ mix_bits(position))
        second = mix_bits(mix_bits((key >> 32).to(tl.uint32) ^ mix_bits(position + _GOLDEN)) ^ first)
        weight = tl.load(sums + row * num_tiles + at, mask=inside, other=0.0) * tl.exp((top - largest) / temp)
        tile = _invert_cdf(weight, (first >> 8).to(tl.float32) * 5.9604644775390625e-08)
        some = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * row_stride + some, mask=some < size, other=LOWEST).to(tl.float32)
        if bounds is not None:
            x = apply_cut(x, some, tl.load(bounds + row), tl.load(lasts + row))
        weights = tl.exp((x - tl.max(x, 0)) / temp)
        token = (tile * TILE + _invert_cdf(weights, (second >> 8).to(tl.float32) * 5.9604644775390625e-08)).to(tl.int64)
    else:
        token = tl.min(tl.where(top == largest, place, NO_TOKEN), 0).to(tl.int64)
    tl.store(out + row, token)
    if last is not None:
        tl.store(last + entry, token)
    if numbers is not None:
        param = numbers + entry * _NUM_PARAMS
        penal = (tl.load(param + _REPETITION) != 1) | (tl.load(param + _FREQUENCY) != 0)
        if (penal | (tl.load(param + _PRESENCE) != 0)) & (token >= 0):
            count = tl.load(counts + entry * size + token).to(tl.int32)
            tl.store(counts + entry * size + token, tl.minimum(count + 2, _MAX_COUNTED).to(tl.int16))


@sample.impl("cuda", exact=True)
def _body(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    rows: Tensor | None = None,
    last: Tensor | None = None,
    row_params: RowParams | None = None,
    extras: Extras | None = None,
) -> Tensor:
    num_rows, size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    num_tiles = cdiv(size, VOCAB_TILE)
    tops = torch.empty((num_rows, num_tiles), device=logits.device)
    sums = torch.empty((num_rows, num_tiles), device=logits.device)
    places = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    grid, tiles = (num_rows, num_tiles), power_of_2(num_tiles)
    if row_params is None or rows is None:
        _reduce_tiles[grid](
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
            num_tiles,
            VOCAB_TILE,
            SAMPLING_PARTS,
            num_warps=8,
            **pdl_options(logits),
        )
        _draw[(num_rows,)](
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
            num_tiles,
            VOCAB_TILE,
            tiles,
            num_warps=8,
            **pdl_options(logits),
        )
        return out
    numbers, counts, edited = row_params.numbers, row_params.counts, _fit_rows(row_params.edited, num_rows)
    candidates, candidate_ids = (
        _fit_rows(row_params.candidates, num_rows),
        _fit_rows(row_params.candidate_ids, num_rows),
    )
    maxima = torch.empty((num_rows, num_tiles * SAMPLING_PARTS), device=logits.device)
    bounds = torch.empty(num_rows, device=logits.device)
    lasts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    _reduce_tiles[grid](
        logits,
        temperature,
        rows,
        tops,
        sums,
        places,
        numbers,
        counts,
        row_params.words,
        row_params.biased,
        row_params.bias,
        edited,
        maxima,
        logits.stride(0),
        size,
        num_tiles,
        VOCAB_TILE,
        SAMPLING_PARTS,
        num_warps=8,
        **pdl_options(logits),
    )
    temps, step = temperature, None
    if extras is not None:
        step = RareSamplers(
            logits,
            temperature,
            keys,
            positions,
            rows,
            row_params,
            extras,
            edited,
            tops,
            sums,
            places,
            maxima,
            candidates,
            candidate_ids,
            bounds,
            lasts,
        )
        temps = step.before_cut()
    cut[(num_rows,)](
        edited,
        numbers,
        temps,
        rows,
        tops,
        sums,
        maxima,
        candidates,
        candidate_ids,
        bounds,
        lasts,
        size,
        num_tiles,
        num_tiles * SAMPLING_PARTS,
        NUM_PARAMS,
        MAX_CANDIDATES,
        VOCAB_TILE,
        tiles,
        SAMPLING_PIVOTS,
        SAMPLING_BLOCK,
        num_warps=8,
        **pdl_options(logits),
    )
    cut_sums[grid](
        edited, temps, rows, tops, sums, bounds, lasts, size, num_tiles, VOCAB_TILE, num_warps=8, **pdl_options(logits)
    )
    if step is not None:
        sums = step.after_cut()
    _draw[(num_rows,)](
        edited,
        temps,
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
        num_tiles,
        VOCAB_TILE,
        tiles,
        num_warps=8,
        **pdl_options(logits),
    )
    if step is not None:
        step.update(sums, out)
    return out


def _fit_rows(scratch: Tensor, num_rows: int) -> Tensor:
    """Return `scratch`, or a new one if the step has more rows than it."""
    return (
        scratch
        if num_rows <= len(scratch)
        else torch.empty((num_rows, scratch.shape[1]), dtype=scratch.dtype, device=scratch.device)
    )
