from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.cache import head_size_of
from penstock.ops.attention.cache_write import cache_write
from penstock.ops.cpu.attention.cache import cache_arguments
from penstock.ops.cpu.runtime.library import Kernel, as_integers, as_rows

_kernel = Kernel("cache_write", "pnpnpnpnpnpnipnnnnn")


@cache_write.impl("cpu", exact=True)
def _cache_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    caches = cache_arguments(k_cache, v_cache, k_scale, v_scale)
    k, v, slots = as_rows("k", k), as_rows("v", v), as_integers(slots, torch.int64)
    num_blocks, num_heads, _, size = k_cache.shape
    head_size = head_size_of(k_cache)
    if k.shape != v.shape or k.shape != (slots.shape[0], num_heads, head_size):
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)} and slots {tuple(slots.shape)} do not fit caches "
            f"{tuple(k_cache.shape)}"
        )
    _kernel(
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        *caches,
        slots.data_ptr(),
        k.shape[0],
        num_blocks,
        num_heads,
        size,
        head_size,
    )
