from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.qkv_write import qkv_write
from penstock.ops.triton.attention.attend import cache_args, can_read
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.numbers import norm_factor, saturate
from penstock.ops.triton.sizes import norm_block, power_of_2
from penstock.ops.triton.tuning import MAX_HEADS_PER_PROGRAM, QKV_WRITE_WARPS


class Rotation(NamedTuple):
    """Head norms and rope of queries and keys; each may be None."""

    q_norm: Any
    k_norm: Any
    cos: Any
    sin: Any
    eps: float


class DeferredNorm(NamedTuple):
    """Rows whose deferred RMS norm multiplies qkv, or None."""

    x: Any
    row: int
    width: int
    eps: float


def source_args(source: Tensor | None, eps: float) -> DeferredNorm:
    return (
        DeferredNorm(None, 0, 0, eps)
        if source is None
        else DeferredNorm(source, source.stride(0), source.shape[1], eps)
    )


@triton.jit
def _load_normed(head, at, inside, norm, factor, row_factor):
    """Load values [heads, n] of some heads, normed."""
    x = tl.load(head[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32) * row_factor
    if norm is not None:
        x *= factor[:, None] * tl.load(norm + at, mask=at >= 0, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _rotate_into(
    head,
    target,
    there,
    norm,
    rotation,
    position,
    row_factor,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Store some heads at `target`, times the row's factor, normed and rotated."""
    at, whole = tl.arange(0, BLOCK), tl.arange(0, WHOLE)
    factor = tl.zeros_like(there.to(tl.float32))
    if norm is not None:
        x = tl.load(head[:, None] + whole[None, :], mask=there[:, None] & (whole < SIZE)[None, :], other=0.0)
        x = x.to(tl.float32) * row_factor
        factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + rotation.eps)
    near = at
    if BLOCK > HALF:
        near = tl.minimum(at, HALF - 1)  # within the norm's weights
    inside = there[:, None] & (at < HALF)[None, :]
    a = _load_normed(head, near, inside, norm, factor, row_factor)
    b = _load_normed(head, HALF + near, inside, norm, factor, row_factor)
    if rotation.cos is not None:
        c = tl.load(rotation.cos + position * HALF + near)[None, :]
        s = tl.load(rotation.sin + position * HALF + near)[None, :]
        x = a * c - b * s
        b = b * c + a * s
        a = x
    tl.store(target[:, None] + at[None, :], saturate(a, DTYPE), mask=inside)
    tl.store(target[:, None] + HALF + at[None, :], saturate(b, DTYPE), mask=inside)
    if 2 * HALF < SIZE:
        rest = tl.minimum(2 * HALF + whole, SIZE - 1)
        inside = there[:, None] & (2 * HALF + whole < SIZE)[None, :]
        x = _load_normed(head, rest, inside, norm, factor, row_factor)
        tl.store(target[:, None] + rest[None, :], saturate(x, DTYPE), mask=inside)


@triton.jit
def _qkv_write(
    qkv,
    cache,
    slots,
    positions,
    rotation,
    source,
    out,
    num_heads,
    num_kv_heads,
    qkv_row,
    P: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    HEADS: tl.constexpr,
    ROOM: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one token, all of one kind: queries go to `out`, keys and values to their slot; slots < 0 are
    padding."""
    wait_for_previous(PDL)
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    some = tl.arange(0, ROOM)
    h = part * HEADS + some
    there = some < HEADS
    head = qkv + t * qkv_row + h * SIZE
    slot = tl.load(slots + t)
    position = tl.load(positions + t)
    row_factor = 1.0
    if source.x is not None:
        row_factor = norm_factor(source.x + t * source.row, source.width, source.eps, NORM_BLOCK)
    if part * HEADS < num_heads:
        target = out + (t * num_heads + h) * SIZE
        _rotate_into(
            head,
            target,
            there,
            rotation.q_norm,
            rotation,
            position,
            row_factor,
            HALF,
            SIZE,
            BLOCK,
            WHOLE,
            out.dtype.element_ty,
        )
    elif slot >= 0:
        block, place = slot // P, slot % P
        if part * HEADS < num_heads + num_kv_heads:
            target = cache.k + block * cache.k_block + place * cache.k_position + (h - num_heads) * cache.k_head
            _rotate_into(
                head,
                target,
                there,
                rotation.k_norm,
                rotation,
                position,
                row_factor,
                HALF,
                SIZE,
                BLOCK,
                WHOLE,
                cache.k.dtype.element_ty,
            )
        else:
            whole = tl.arange(0, WHOLE)
            inside = there[:, None] & (whole < SIZE)[None, :]
            v = tl.load(head[:, None] + whole[None, :], mask=inside, other=0.0).to(tl.float32) * row_factor
            v_head = h - num_heads - num_kv_heads
            target = cache.v + block * cache.v_block + place * cache.v_position + v_head * cache.v_head
            tl.store(target[:, None] + whole[None, :], saturate(v, cache.v.dtype.element_ty), mask=inside)


@qkv_write.impl("cuda", exact=True)
def _body(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    source: Tensor | None = None,
    source_eps: float = 0.0,
) -> Tensor:
    _, num_kv_heads, size, block_size = k_cache.shape
    if not can_read(k_cache, v_cache, k_scale):
        return qkv_write.reference(
            qkv, k_cache, v_cache, slots, positions, q_norm, k_norm, eps, cos, sin, k_scale, v_scale, source, source_eps
        )
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    out = torch.empty((num_tokens, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    half = size // 2 if cos is None else cos.shape[1]
    if num_tokens:
        together = gcd(num_heads, num_kv_heads)
        together = max(count for count in range(1, MAX_HEADS_PER_PROGRAM + 1) if together % count == 0)
        _qkv_write[(num_tokens, (num_heads + 2 * num_kv_heads) // together)](
            qkv,
            cache_args(k_cache, v_cache),
            slots,
            positions,
            Rotation(q_norm, k_norm, cos, sin, eps),
            source_args(source, source_eps),
            out,
            num_heads,
            num_kv_heads,
            qkv.stride(0),
            block_size,
            half,
            size,
            power_of_2(half),
            power_of_2(size),
            together,
            power_of_2(together),
            norm_block(0 if source is None else source.shape[1]),
            num_warps=QKV_WRITE_WARPS,
            **pdl_options(qkv),
        )
    return out
