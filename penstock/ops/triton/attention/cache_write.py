from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.cache_write import cache_write
from penstock.ops.triton.attention.attend import cache_args, can_read
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.numbers import saturate
from penstock.ops.triton.sizes import power_of_2


@triton.jit
def _cache_write(
    k,
    v,
    cache,
    slots,
    k_strides,
    v_strides,
    P: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write key and value of one head of one token to their slot; slots < 0 are padding."""
    wait_for_previous(PDL)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    slot = tl.load(slots + t)
    inside = at < SIZE
    if slot >= 0:
        block, place = slot // P, slot % P
        key = tl.load(k + t * k_strides[0] + h * k_strides[1] + at, mask=inside, other=0.0)
        value = tl.load(v + t * v_strides[0] + h * v_strides[1] + at, mask=inside, other=0.0)
        k_at = cache.k + block * cache.k_block + h * cache.k_head + place * cache.k_position + at
        v_at = cache.v + block * cache.v_block + h * cache.v_head + place * cache.v_position + at
        tl.store(k_at, saturate(key, cache.k.dtype.element_ty), mask=inside)
        tl.store(v_at, saturate(value, cache.v.dtype.element_ty), mask=inside)


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
    if not can_read(k_cache, v_cache, k_scale):
        return cache_write.reference(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    num_tokens, num_heads, size = k.shape
    if num_tokens:
        k, v = (one if one.stride(2) == 1 else one.contiguous() for one in (k, v))
        _cache_write[(num_tokens, num_heads)](
            k,
            v,
            cache_args(k_cache, v_cache),
            slots,
            k.stride()[:2],
            v.stride()[:2],
            k_cache.shape[3],
            size,
            power_of_2(size),
            num_warps=1,
            **pdl_options(k),
        )
    return None
