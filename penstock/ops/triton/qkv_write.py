from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.qkv_write import qkv_write
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import fitted, norm_factor
from penstock.ops.triton.sizes import norm_block, power_of_2

MOST_HEADS = 8  # in one program
NUM_WARPS = 2


@triton.jit
def _loaded(head, at, inside, norm, factor, whole):
    """Values [heads, n] of some heads, normed."""
    x = tl.load(head[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32) * whole
    if norm is not None:
        x *= factor[:, None] * tl.load(norm + at, mask=at >= 0, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _turn_into(
    head,
    target,
    there,
    norm,
    cos,
    sin,
    position,
    eps,
    row_factor,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Some heads, times the row's factor, normed and turned, to where they belong."""
    at, whole = tl.arange(0, BLOCK), tl.arange(0, WHOLE)
    factor = tl.zeros_like(there.to(tl.float32))
    if norm is not None:
        x = tl.load(head[:, None] + whole[None, :], mask=there[:, None] & (whole < SIZE)[None, :], other=0.0)
        x = x.to(tl.float32) * row_factor
        factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    near = at
    if BLOCK > HALF:
        near = tl.minimum(at, HALF - 1)  # within the norm's weights
    inside = there[:, None] & (at < HALF)[None, :]
    a = _loaded(head, near, inside, norm, factor, row_factor)
    b = _loaded(head, HALF + near, inside, norm, factor, row_factor)
    if cos is not None:
        c = tl.load(cos + position * HALF + near)[None, :]
        s = tl.load(sin + position * HALF + near)[None, :]
        x = a * c - b * s
        b = b * c + a * s
        a = x
    tl.store(target[:, None] + at[None, :], fitted(a, DTYPE), mask=inside)
    tl.store(target[:, None] + HALF + at[None, :], fitted(b, DTYPE), mask=inside)
    if 2 * HALF < SIZE:
        rest = tl.minimum(2 * HALF + whole, SIZE - 1)
        inside = there[:, None] & (2 * HALF + whole < SIZE)[None, :]
        x = _loaded(head, rest, inside, norm, factor, row_factor)
        tl.store(target[:, None] + rest[None, :], fitted(x, DTYPE), mask=inside)


@triton.jit
def _write(
    qkv,
    k_cache,
    v_cache,
    slots,
    positions,
    q_norm,
    k_norm,
    cos,
    sin,
    source,
    out,
    eps,
    source_eps,
    num_heads,
    num_kv_heads,
    source_row,
    source_width,
    qkv_row,
    k_block,
    k_head,
    k_place,
    v_block,
    v_head,
    v_place,
    P: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    HEADS: tl.constexpr,
    ROOM: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some heads of one token, all of one kind: queries go to `out`, keys and values to their slot; a slot under 0 is
    nobody's."""
    await_others(EARLY)
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    some = tl.arange(0, ROOM)
    h = part * HEADS + some
    there = some < HEADS
    head = qkv + t * qkv_row + h * SIZE
    slot = tl.load(slots + t)
    position = tl.load(positions + t)
    row_factor = 1.0
    if source is not None:
        row_factor = norm_factor(source + t * source_row, source_width, source_eps, NORMED)
    if part * HEADS < num_heads:
        _turn_into(
            head,
            out + (t * num_heads + h) * SIZE,
            there,
            q_norm,
            cos,
            sin,
            position,
            eps,
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
            target = k_cache + block * k_block + place * k_place + (h - num_heads) * k_head
            _turn_into(
                head,
                target,
                there,
                k_norm,
                cos,
                sin,
                position,
                eps,
                row_factor,
                HALF,
                SIZE,
                BLOCK,
                WHOLE,
                k_cache.dtype.element_ty,
            )
        else:
            whole = tl.arange(0, WHOLE)
            inside = there[:, None] & (whole < SIZE)[None, :]
            v = tl.load(head[:, None] + whole[None, :], mask=inside, other=0.0).to(tl.float32) * row_factor
            target = v_cache + block * v_block + place * v_place + (h - num_heads - num_kv_heads) * v_head
            tl.store(target[:, None] + whole[None, :], fitted(v, v_cache.dtype.element_ty), mask=inside)


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
    if k_scale is not None or k_cache.stride(2) != 1 or v_cache.stride(3) != 1:
        return qkv_write.reference(
            qkv, k_cache, v_cache, slots, positions, q_norm, k_norm, eps, cos, sin, k_scale, v_scale, source, source_eps
        )
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    out = torch.empty((num_tokens, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    half = size // 2 if cos is None else cos.shape[1]
    if num_tokens:
        together = min(MOST_HEADS, gcd(num_heads, num_kv_heads))
        while num_kv_heads % together or num_heads % together:
            together -= 1
        _write[(num_tokens, (num_heads + 2 * num_kv_heads) // together)](
            qkv,
            k_cache,
            v_cache,
            slots,
            positions,
            q_norm,
            k_norm,
            cos,
            sin,
            source,
            out,
            eps,
            source_eps,
            num_heads,
            num_kv_heads,
            0 if source is None else source.stride(0),
            0 if source is None else source.shape[1],
            qkv.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(3),
            v_cache.stride(0),
            v_cache.stride(1),
            v_cache.stride(2),
            block_size,
            half,
            size,
            power_of_2(half),
            power_of_2(size),
            together,
            power_of_2(together),
            norm_block(0 if source is None else source.shape[1]),
            num_warps=NUM_WARPS,
            **early(qkv),
        )
    return out
