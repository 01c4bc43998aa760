from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.cache_write import cache_write
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.numbers import fitted
from penstock.ops.triton.sizes import power_of_2


@triton.jit
def _store(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_row,
    k_own,
    v_row,
    v_own,
    k_block,
    k_head,
    k_place,
    v_block,
    v_head,
    v_place,
    P: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Key and value of one head of one token, to their slot; a slot under 0 is nobody's."""
    await_others(EARLY)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    slot = tl.load(slots + t)
    inside = at < SIZE
    if slot >= 0:
        block, place = slot // P, slot % P
        key = tl.load(k + t * k_row + h * k_own + at, mask=inside, other=0.0)
        value = tl.load(v + t * v_row + h * v_own + at, mask=inside, other=0.0)
        tl.store(
            k_cache + block * k_block + h * k_head + place * k_place + at,
            fitted(key, k_cache.dtype.element_ty),
            mask=inside,
        )
        tl.store(
            v_cache + block * v_block + h * v_head + place * v_place + at,
            fitted(value, v_cache.dtype.element_ty),
            mask=inside,
        )


@cache_write.impl("cuda", exact=True)
def _body(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    if k_scale is not None or k_cache.stride(2) != 1 or v_cache.stride(3) != 1:
        return cache_write.reference(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    num_tokens, num_heads, size = k.shape
    if num_tokens:
        k, v = (one if one.stride(2) == 1 else one.contiguous() for one in (k, v))
        _store[(num_tokens, num_heads)](
            k,
            v,
            k_cache,
            v_cache,
            slots,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(3),
            v_cache.stride(0),
            v_cache.stride(1),
            v_cache.stride(2),
            k_cache.shape[3],
            size,
            power_of_2(size),
            num_warps=1,
            **early(k),
        )
    return None
