"""What the kernels demand of a paged cache."""

from __future__ import annotations

from torch import Tensor


def check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Both [N, K, P, D] of one dtype, each block contiguous; blocks may lie anywhere."""
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(f"k_cache is {k_cache.dtype}{list(k_cache.shape)} but v_cache is "
                         f"{v_cache.dtype}{list(v_cache.shape)}: they must be alike")
    _, _, size, head_size = k_cache.shape
    inner = (size * head_size, head_size, 1)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride()[1:] != inner:
            raise ValueError(f"{name} has the strides {cache.stride()}: each block [K, P, D] must be contiguous")
