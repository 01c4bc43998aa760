"""Pass paged caches to the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.runtime.library import TYPES, pointer

CACHE_TYPES = TYPES | {torch.int8: 3}  # as in number.h and attention/cache.h
Caches = tuple[int | None, ...]


def cache_arguments(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> Caches:
    """Check the caches; give address and block stride of each tensor, and the type.

    Keys are [N, K, D, P], values [N, K, P, D], scales of an int8 cache [N, K, P]. Each block must be contiguous; blocks
    may lie anywhere.
    """
    num_blocks, num_heads, head_size, size = k_cache.shape
    if v_cache.shape != (num_blocks, num_heads, size, head_size) or k_cache.dtype is not v_cache.dtype:
        raise ValueError(
            f"k_cache is {k_cache.dtype}{list(k_cache.shape)} but v_cache is "
            f"{v_cache.dtype}{list(v_cache.shape)}: they must be [N, K, D, P] and [N, K, P, D] alike"
        )
    if k_cache.stride()[1:] != (head_size * size, size, 1) or v_cache.stride()[1:] != (head_size * size, head_size, 1):
        raise ValueError(
            f"the caches have the strides {k_cache.stride()} and {v_cache.stride()}: "
            "each block of keys and of values must be contiguous"
        )
    return (
        k_cache.data_ptr(),
        k_cache.stride(0),
        v_cache.data_ptr(),
        v_cache.stride(0),
        *_scale_arguments(k_cache, k_scale, v_scale),
        CACHE_TYPES[k_cache.dtype],
    )


def _scale_arguments(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> Caches:
    if k_cache.dtype is not torch.int8:
        return None, 0, None, 0
    num_blocks, num_heads, _, size = k_cache.shape
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (
            scale is None
            or scale.shape != (num_blocks, num_heads, size)
            or scale.dtype is not torch.float32
            or scale.stride()[1:] != (size, 1)
        ):
            found = None if scale is None else f"{scale.dtype}{list(scale.shape)} with the strides {scale.stride()}"
            raise ValueError(f"{name} is {found}: an int8 cache needs float32 scales [N, K, P], each block contiguous")
    assert k_scale is not None and v_scale is not None
    return pointer(k_scale), k_scale.stride(0), pointer(v_scale), v_scale.stride(0)
