"""Pass paged caches to the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.cache import INT4_GROUP, head_size_of
from penstock.ops.cpu.runtime.library import TYPES, pointer

CACHE_TYPES = TYPES | {torch.int8: 3, torch.uint8: 4}  # as in number.h and attention/cache.h
Caches = tuple[int | None, ...]


def cache_arguments(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> Caches:
    """Check the caches; give address and block stride of each tensor, and the type.

    Their shapes are those of `penstock.ops.attention.cache`. Each block must be contiguous; blocks may lie anywhere.
    """
    num_blocks, num_heads, rows, size = k_cache.shape
    if v_cache.shape != (num_blocks, num_heads, size, rows) or k_cache.dtype is not v_cache.dtype:
        raise ValueError(
            f"k_cache is {k_cache.dtype}{list(k_cache.shape)} but v_cache is "
            f"{v_cache.dtype}{list(v_cache.shape)}: they must be [N, K, D, P] and [N, K, P, D] alike"
        )
    if k_cache.stride()[1:] != (rows * size, size, 1) or v_cache.stride()[1:] != (rows * size, rows, 1):
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


def _is_dense(scale: Tensor) -> bool:
    return scale.shape[0] == 0 or scale[0].is_contiguous()


def _scale_arguments(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> Caches:
    if k_cache.dtype not in (torch.int8, torch.uint8):
        return None, 0, None, 0
    num_blocks, num_heads, _, size = k_cache.shape
    num_groups = -(-head_size_of(k_cache) // INT4_GROUP)
    shapes = [(num_groups, 2, size), (size, num_groups, 2)] if k_cache.dtype is torch.uint8 else [(size,)] * 2
    dtype = torch.float16 if k_cache.dtype is torch.uint8 else torch.float32
    for name, scale, shape in (("k_scale", k_scale, shapes[0]), ("v_scale", v_scale, shapes[1])):
        expected = (num_blocks, num_heads, *shape)
        if scale is None or scale.shape != expected or scale.dtype is not dtype or not _is_dense(scale):
            found = None if scale is None else f"{scale.dtype}{list(scale.shape)} with the strides {scale.stride()}"
            raise ValueError(
                f"{name} is {found}: a cache of {k_cache.dtype} needs {dtype}{list(expected)}, each block contiguous"
            )
    assert k_scale is not None and v_scale is not None
    return pointer(k_scale), k_scale.stride(0), pointer(v_scale), v_scale.stride(0)
