from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.attention import Work, attention
from penstock.ops.attention.cache import head_size_of
from penstock.ops.attention.tree_attention import Tail, tree_attention
from penstock.ops.cpu.attention.cache import cache_arguments
from penstock.ops.cpu.runtime.library import Kernel, as_integers, as_rows, check_float32, empty_like, pointer

_kernel = Kernel("attention", "pnpnpnpnpninpnnppnnnnnfnfppp")
_tree_kernel = Kernel("tree_attention", "pnpnpnpnpninpnnppnnnnnfnfpppppnnp")


def _check_shapes(q: Tensor, k_cache: Tensor, table: Tensor, query_start: Tensor, lengths: Tensor) -> None:
    num_sequences = lengths.shape[0]
    if q.shape[2] != head_size_of(k_cache) or q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not fit caches {tuple(k_cache.shape)}")
    if table.shape[0] != num_sequences or query_start.shape[0] != num_sequences + 1:
        raise ValueError(
            f"table {tuple(table.shape)} and query_start {tuple(query_start.shape)} do not fit {num_sequences} lengths"
        )


def _per_head(name: str, values: Tensor | None, num_heads: int) -> Tensor | None:
    if values is None:
        return None
    if values.shape != (num_heads,):
        raise ValueError(f"{name} has the shape {tuple(values.shape)}, not ({num_heads},)")
    return check_float32(name, values).contiguous()


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
    sinks: Tensor | None = None,
) -> Tensor:
    caches = cache_arguments(k_cache, v_cache, k_scale, v_scale)
    q = as_rows("q", q)
    table, query_start, lengths = (as_integers(x, torch.int32) for x in (table, query_start, lengths))
    alibi, sinks = _per_head("alibi", alibi, q.shape[1]), _per_head("sinks", sinks, q.shape[1])
    num_blocks, num_kv_heads, _, size = k_cache.shape
    _check_shapes(q, k_cache, table, query_start, lengths)
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
        lengths.shape[0],
        q.shape[1],
        num_kv_heads,
        size,
        q.shape[2],
        scale,
        window,
        softcap,
        pointer(alibi),
        pointer(sinks),
        out.data_ptr(),
    )
    return out


@tree_attention.impl("cpu", exact=True)
def _tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    tail: Tail,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    caches = cache_arguments(k_cache, v_cache, k_scale, v_scale)
    q = as_rows("q", q)
    table, query_start, lengths = (as_integers(x, torch.int32) for x in (table, query_start, lengths))
    begins, nodes = as_integers(tail.begins, torch.int32), as_integers(tail.nodes, torch.int32)
    positions = as_integers(tail.positions, torch.int64)
    alibi, sinks = _per_head("alibi", alibi, q.shape[1]), _per_head("sinks", sinks, q.shape[1])
    num_blocks, num_kv_heads, _, size = k_cache.shape
    _check_shapes(q, k_cache, table, query_start, lengths)
    if begins.shape != lengths.shape or positions.shape[0] != q.shape[0] or nodes.shape[0] != q.shape[0]:
        shapes = ", ".join(str(tuple(x.shape)) for x in tail)
        raise ValueError(f"the tail's {shapes} do not fit {q.shape[0]} queries of {lengths.shape[0]} sequences")
    out = empty_like(q)
    _tree_kernel(
        q.data_ptr(),
        q.stride(0),
        *caches,
        num_blocks,
        table.data_ptr(),
        table.stride(0),
        table.shape[1],
        query_start.data_ptr(),
        lengths.data_ptr(),
        lengths.shape[0],
        q.shape[1],
        num_kv_heads,
        size,
        q.shape[2],
        scale,
        window,
        softcap,
        pointer(alibi),
        pointer(sinks),
        begins.data_ptr(),
        positions.data_ptr(),
        nodes.data_ptr(),
        nodes.stride(0),
        nodes.shape[1],
        out.data_ptr(),
    )
    return out
