from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.qkv_write import qkv_write
from penstock.ops.triton.numbers import fitted


@triton.jit
def _turned(head, norm, cos, sin, position, eps, HALF: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
            WHOLE: tl.constexpr):
    """Both halves of the rotated part of one head, normed and turned, and the factor of the norm."""
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    a = tl.load(head + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(head + HALF + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if norm is not None:
        squares = tl.sum(a * a) + tl.sum(b * b)
        rest = 2 * HALF + tl.arange(0, WHOLE)
        if 2 * HALF < SIZE:
            c = tl.load(head + rest, mask=rest < SIZE, other=0.0).to(tl.float32)
            squares += tl.sum(c * c)
        factor = tl.rsqrt(squares / SIZE + eps)
        a *= factor * tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        b *= factor * tl.load(norm + HALF + at, mask=inside, other=0.0).to(tl.float32)
    if cos is not None:
        c = tl.load(cos + position * HALF + at, mask=inside, other=0.0)
        s = tl.load(sin + position * HALF + at, mask=inside, other=0.0)
        x = a * c - b * s
        b = b * c + a * s
        a = x
    return a, b, factor


@triton.jit
def _write(qkv, k_cache, v_cache, slots, positions, q_norm, k_norm, cos, sin, out, eps, num_heads, num_kv_heads,
           qkv_row, k_block, k_head, k_place, v_block, v_head, v_place, P: tl.constexpr, HALF: tl.constexpr,
           SIZE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """One head of one token: a query goes to `out`, a key or value to its slot; a slot under 0 is nobody's."""
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = qkv + t * qkv_row + h * SIZE
    slot = tl.load(slots + t)
    position = tl.load(positions + t)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    rest = 2 * HALF + tl.arange(0, WHOLE)
    beyond = rest < SIZE
    if h < num_heads:
        a, b, factor = _turned(head, q_norm, cos, sin, position, eps, HALF, SIZE, BLOCK, WHOLE)
        target = out + (t * num_heads + h) * SIZE
        tl.store(target + at, a.to(out.dtype.element_ty), mask=inside)
        tl.store(target + HALF + at, b.to(out.dtype.element_ty), mask=inside)
        if 2 * HALF < SIZE:
            c = tl.load(head + rest, mask=beyond, other=0.0).to(tl.float32)
            if q_norm is not None:
                c *= factor * tl.load(q_norm + rest, mask=beyond, other=0.0).to(tl.float32)
            tl.store(target + rest, c.to(out.dtype.element_ty), mask=beyond)
    elif slot >= 0:
        block, place = slot // P, slot % P
        if h < num_heads + num_kv_heads:
            a, b, factor = _turned(head, k_norm, cos, sin, position, eps, HALF, SIZE, BLOCK, WHOLE)
            target = k_cache + block * k_block + (h - num_heads) * k_head + place * k_place
            tl.store(target + at, fitted(a, k_cache.dtype.element_ty), mask=inside)
            tl.store(target + HALF + at, fitted(b, k_cache.dtype.element_ty), mask=inside)
            if 2 * HALF < SIZE:
                c = tl.load(head + rest, mask=beyond, other=0.0).to(tl.float32)
                if k_norm is not None:
                    c *= factor * tl.load(k_norm + rest, mask=beyond, other=0.0).to(tl.float32)
                tl.store(target + rest, fitted(c, k_cache.dtype.element_ty), mask=beyond)
        else:
            whole = tl.arange(0, WHOLE)
            v = tl.load(head + whole, mask=whole < SIZE, other=0.0)
            target = v_cache + block * v_block + (h - num_heads - num_kv_heads) * v_head + place * v_place
            tl.store(target + whole, fitted(v, v_cache.dtype.element_ty), mask=whole < SIZE)


@qkv_write.impl("cuda", exact=True)
def _body(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, positions: Tensor,
          q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0, cos: Tensor | None = None,
          sin: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> Tensor:
    _, num_kv_heads, size, block_size = k_cache.shape
    if k_scale is not None or k_cache.stride(2) != 1 or v_cache.stride(3) != 1:
        return qkv_write.reference(qkv, k_cache, v_cache, slots, positions, q_norm, k_norm, eps, cos, sin, k_scale,
                                   v_scale)
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    out = torch.empty((num_tokens, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    half = size // 2 if cos is None else cos.shape[1]
    if num_tokens:
        _write[(num_tokens, num_heads + 2 * num_kv_heads)](
            qkv, k_cache, v_cache, slots, positions, q_norm, k_norm, cos, sin, out, eps, num_heads, num_kv_heads,
            qkv.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(3), v_cache.stride(0),
            v_cache.stride(1), v_cache.stride(2), block_size, half, size, triton.next_power_of_2(half),
            triton.next_power_of_2(size), num_warps=1)
    return out
