from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.inputs import ID, NUM_COMMON, POSITION, ROW, single_inputs
from penstock.ops.triton.launch import await_others, early

_ROW, _ID, _POSITION, _COMMON = (tl.constexpr(value) for value in (ROW, ID, POSITION, NUM_COMMON))


@triton.jit(do_not_specialize=["num", "group", "table_row", "step_row"])
def _inputs(
    numbers,
    last,
    table,
    ids,
    positions,
    lengths,
    slots,
    step_table,
    num,
    group,
    table_row,
    step_row,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_others(EARLY)
    s = tl.program_id(0)
    row = tl.load(numbers + _ROW * num + s).to(tl.int64)
    given = tl.load(numbers + _ID * num + s).to(tl.int64)
    where = tl.load(numbers + _POSITION * num + s)
    index = tl.load(numbers + (_COMMON + 2 * group) * num + s)
    block = tl.load(numbers + (_COMMON + 2 * group + 1) * num + s)
    if index >= 0:
        tl.store(table + row * table_row + index, block)
    kept = tl.load(last + row)
    tl.store(ids + s, tl.where(given >= 0, given, tl.maximum(kept, 0)))
    position = tl.maximum(where, 0)
    tl.store(positions + s, position.to(tl.int64))
    tl.store(lengths + s, where + 1)
    # What was stored above may not be seen by a load of other threads: the new block is put in by hand.
    at = position // P
    own = tl.load(table + row * table_row + at)
    own = tl.where(at == index, block, own)
    tl.store(slots + s, tl.where(where >= 0, own.to(tl.int64) * P + position % P, -1))
    for start in range(0, (where + P) // P, BLOCK):
        b = start + tl.arange(0, BLOCK)
        inside = b < (where + P) // P
        found = tl.load(table + row * table_row + b, mask=inside, other=-1)
        tl.store(step_table + s * step_row + b, tl.where(b == index, block, found), mask=inside)


@single_inputs.impl("cuda", exact=True)
def _body(
    numbers: Tensor,
    last: Tensor,
    table: Tensor,
    group: int,
    block_size: int,
    ids: Tensor,
    positions: Tensor,
    lengths: Tensor,
    slots: Tensor,
    step_table: Tensor,
) -> None:
    _inputs[(numbers.shape[1],)](
        numbers,
        last,
        table,
        ids,
        positions,
        lengths,
        slots,
        step_table,
        numbers.shape[1],
        group,
        table.stride(0),
        step_table.stride(0),
        block_size,
        128,
        num_warps=1,
        **early(numbers),
    )
