from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.inputs import ID, NUM_COMMON, POSITION, ROW, single_inputs
from penstock.ops.triton.launch import pdl_options, wait_for_previous

_ROW, _ID, _POSITION, _COMMON = (tl.constexpr(value) for value in (ROW, ID, POSITION, NUM_COMMON))


@triton.jit(do_not_specialize=["num", "group", "table_row", "step_row"])
def _decode_inputs(
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
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
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
    # Other threads' loads may not see the store above: put the new block in by hand.
    if STATE == 0:
        num_blocks = (where + P) // P
        at = position // P
        own = tl.load(table + row * table_row + at)
        own = tl.where(at == index, block, own)
        tl.store(slots + s, tl.where(where >= 0, own.to(tl.int64) * P + position % P, -1))
    else:
        num_blocks = STATE
    for start in range(0, num_blocks, BLOCK):
        b = start + tl.arange(0, BLOCK)
        inside = b < num_blocks
        found = tl.load(table + row * table_row + b, mask=inside, other=-1)
        found = tl.where(b == index, block, found)
        if STATE:
            found = tl.where(where >= 0, found, -1)
        tl.store(step_table + s * step_row + b, found, mask=inside)


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
    slots: Tensor | None,
    step_table: Tensor,
) -> None:
    _decode_inputs[(numbers.shape[1],)](
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
        0 if slots is not None else step_table.shape[1],
        128,
        num_warps=1,
        **pdl_options(numbers),
    )
