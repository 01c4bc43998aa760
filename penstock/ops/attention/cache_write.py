"""Storing keys and values of new tokens in the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.cache import bits, cast_to_cache, quantize_int4, quantize_int8
from penstock.ops.registry import op


@op(tolerance={torch.float32: 0.0}, rowwise=True)
def cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write k and v [T, K, D] into the caches [N, K, D, P] and [N, K, P, D] at slots[T] = block · P + offset.

    Values are rounded to the caches' dtype; of int8 and int4 the scales say what the codes stand for.
    """
    block, place = slots // k_cache.shape[3], slots % k_cache.shape[3]
    if k_scale is not None and v_scale is not None and k_cache.dtype is torch.uint8:
        k_cache[block, :, :, place], k_scale[block, :, :, :, place] = quantize_int4(k)
        v_cache[block, :, place], v_scale[block, :, place] = quantize_int4(v)
    elif k_scale is not None and v_scale is not None:
        k_cache[block, :, :, place], k_scale[block, :, place] = quantize_int8(k)
        v_cache[block, :, place], v_scale[block, :, place] = quantize_int8(v)
    else:
        bits(k_cache)[block, :, :, place] = bits(cast_to_cache(k, k_cache.dtype))
        bits(v_cache)[block, :, place] = bits(cast_to_cache(v, v_cache.dtype))
