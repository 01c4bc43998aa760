from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.attention import Work, attention
from penstock.ops.cpu.attention.cache import cache_arguments
from penstock.ops.cpu.runtime.library import Kernel, as_integers, as_rows, check_float32, empty_like, pointer

_kernel = Kernel("attention", "pnpnpnpnpninpnnppnnnnnfnfpp")


@attention.impl("cpu", exact=True)
def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    work: Work | None = None,
) -> Tensor:
    caches = cache_arguments(k_cache, v_cache, k_scale, v_scale)
    q = as_rows("q", q)
    table, query_start, lengths = (as_integers(x, torch.int32) for x in (table, query_start, lengths))
    alibi = None if alibi is None else check_float32("alibi", alibi).contiguous()
    num_blocks, num_kv_heads, head_size, size = k_cache.shape
    num_sequences, num_heads = lengths.shape[0], q.shape[1]
    if q.shape[2] != head_size or num_heads % num_kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit caches {tuple(k_cache.shape)}")
    if table.shape[0] != num_sequences or query_start.shape[0] != num_sequences + 1:
        raise ValueError(
            f"table {tuple(table.shape)} and query_start {tuple(query_start.shape)} do not fit {num_sequences} lengths"
        )
    out = empty_like(q)
    _kernel(
        q.data_ptr(),
        q.stride(0),
        *caches,
        num_blocks,
        table.data_ptr(),
        table.stride(0),
        table.shape[1],
        query_start.data_ptr(),
        lengths.data_ptr(),
        num_sequences,
        num_heads,
        num_kv_heads,
        size,
        head_size,
        scale,
        window,
        softcap,
        pointer(alibi),
        out.data_ptr(),
    )
    return out
