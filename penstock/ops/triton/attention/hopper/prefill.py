"""The kernel, which of its arguments it can take, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.ops.attention.attention import Work
from penstock.ops.triton import launch
from penstock.ops.triton.attention.attend import PagedStep
from penstock.ops.triton.attention.hopper.consumer import consume
from penstock.ops.triton.attention.hopper.producer import CacheRows, produce
from penstock.ops.triton.attention.hopper.tiles import HALF, NUM, ROWS, SIZE, STAGES, Tiles

LOG2_E = 1.4426950408889634
DTYPES = (torch.bfloat16, torch.float16)
PACKS = (1, 2, 4, 8)  # query heads per KV head
BLOCK_SIZES = (16, 32, 64, 128)  # positions of a cache block
ALIGNMENT = 16  # bytes, of addresses and strides that TMA reads
FLAT, DEEP = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 16, 3)
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # Triton 3.6 has it underlined


@gluon.jit
def _reinterpret(buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    if HAS_REINTERPRET:
        view = buffer.reinterpret(buffer.dtype, SHAPE, LAYOUT)
    else:
        view = buffer._reinterpret(buffer.dtype, SHAPE, LAYOUT)
    return view


@gluon.jit
def _make_barriers():
    """Return barriers for queries, keys and values: those that copying arrives at, those that computing does."""
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # both warpgroups
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    return q_ready, q_empty, k_ready, k_empty, v_ready, v_empty


@gluon.jit(do_not_specialize=["num_tiles", "table_row"])
def _prefill_hopper(
    q_desc,
    k_desc,
    v_desc,
    work,
    rows,
    out,
    factor,
    num_heads,
    num_tiles,
    table_row,
    P: gl.constexpr,
    PACK: gl.constexpr,
):
    """Tiles of 128 rows: 128 // PACK queries of one sequence, for the PACK query heads of one KV head."""
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    DEEP: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    DTYPE: gl.constexpr = q_desc.dtype
    if work.count is not None:
        num_tiles = gl.load(work.count)
    q_buffers = gl.allocate_shared_memory(DTYPE, [4, ROWS // PACK, PACK, HALF], DEEP)
    k_buffers = gl.allocate_shared_memory(DTYPE, [STAGES * 2 * (NUM // P), P, HALF], FLAT)
    v_buffers = gl.allocate_shared_memory(DTYPE, [STAGES * 2 * (NUM // P), P, HALF], FLAT)
    queries = _reinterpret(q_buffers, [2, ROWS, SIZE], FLAT)
    keys = _reinterpret(k_buffers, [STAGES, NUM, SIZE], FLAT)
    values = _reinterpret(v_buffers, [STAGES, NUM, SIZE], FLAT)
    bars = _make_barriers()
    buffers, views, descs = (q_buffers, k_buffers, v_buffers), (queries, keys, values), (q_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (consume, (views, bars, work, out, factor, num_heads, num_tiles, 0, PACK)),
            (consume, (views, bars, work, out, factor, num_heads, num_tiles, 1, PACK)),
            (produce, (descs, buffers, bars, work, rows, num_tiles, table_row, P, PACK)),
        ],
        [4, 1],
        [240, 24],
    )


@dataclass(frozen=True)
class Place:
    """The memory that a descriptor describes; unlike a tensor it keeps none alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=1024)  # two per layer
def _describe_cache(place: Place, num_rows: int, block_size: int) -> TensorDescriptor:
    return TensorDescriptor(place, [num_rows, SIZE.value], [SIZE.value, 1], [block_size, HALF.value], FLAT)


def can_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return True if the kernel can read these queries and this cache."""
    size, block_size = k_cache.shape[2:]
    k, v = k_cache.stride(), v_cache.stride()
    return (
        launch.is_hopper(q.device)
        and q.dtype in DTYPES
        and q.dtype == k_cache.dtype == v_cache.dtype
        and size == SIZE.value
        and q.shape[1] // k_cache.shape[1] in PACKS
        and block_size in BLOCK_SIZES
        and k[3] == v[2] == size
        and not any(stride % size for stride in (*k[:2], *v[:2]))
        and not any(x.data_ptr() % ALIGNMENT for x in (q, k_cache, v_cache))
        and q.stride(0) * q.itemsize % ALIGNMENT == 0
    )


def attend_tiles(q: Tensor, out: Tensor, step: PagedStep, scale: float, work: Work) -> None:
    """Write the results of the step's tiles, of 128 // (query heads per KV head) queries each, to `out`."""
    assert work.tiles is not None
    k_cache, v_cache, table, query_start, lengths = step
    num_tokens, num_heads, size = q.shape
    num_blocks, num_kv_heads, _, block_size = k_cache.shape
    pack, box = num_heads // num_kv_heads, ROWS.value
    k, v = k_cache.stride(), v_cache.stride()
    rows = CacheRows(k[0] // size, k[1] // size, v[0] // size, v[1] // size)
    descs = [
        _describe_cache(
            Place(x.data_ptr(), x.dtype), (num_blocks - 1) * block + (num_kv_heads - 1) * head + block_size, block_size
        )
        for x, block, head in ((k_cache, rows.k_block, rows.k_head), (v_cache, rows.v_block, rows.v_head))
    ]
    q_desc = TensorDescriptor(q, list(q.shape), [q.stride(0), size, 1], [box // pack, pack, HALF.value], DEEP)
    num_tiles = len(work.tiles)
    count = work.num_tiles
    _prefill_hopper[(min(launch.count_sms(q.device), num_tiles * num_kv_heads),)](
        q_desc,
        *descs,
        Tiles(work.tiles, count, query_start, lengths, table, num_kv_heads),
        rows,
        out,
        scale * LOG2_E,
        num_heads,
        0 if count is not None else num_tiles,
        table.stride(0),
        block_size,
        pack,
        num_warps=4,
        maxnreg=168,
    )
