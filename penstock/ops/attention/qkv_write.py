"""From a decoder's joint projection to queries, and keys and values in the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.cache import head_size_of
from penstock.ops.attention.cache_write import cache_write
from penstock.ops.attention.rope import rope
from penstock.ops.norm import rms_norm
from penstock.ops.registry import op


def over_source(qkv: Tensor, source: Tensor, source_eps: float) -> Tensor:
    """Each row over the root mean square of its source."""
    factor = torch.rsqrt(source.float().square().mean(-1, keepdim=True) + source_eps)
    return (qkv.float() * factor).to(qkv.dtype)


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.int8: 1.0})
def qkv_write(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    source: Tensor | None = None,
    source_eps: float = 0.0,
) -> Tensor:
    """qkv[T, (H + 2 K) · D] → queries [T, H, D]; keys and values go to the caches, as in `cache_write`.

    With source[T, C], qkv are sums over rows of it that were not normed before: each is divided by its root mean square
    first.

    Each head of the queries and keys is first normed by `rms_norm` where there is a weight [D], then rotated by `rope`
    where there are cos and sin. The bits are those of the ops one by one.
    """
    num_kv_heads, head_size = k_cache.shape[1], head_size_of(k_cache)
    if source is not None:
        qkv = over_source(qkv, source, source_eps)
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_size, head_size)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = q if q_norm is None else rms_norm.reference(q, q_norm, eps)
    k = k if k_norm is None else rms_norm.reference(k, k_norm, eps)
    if cos is not None and sin is not None:
        q, k = (rope.reference(x, positions, cos, sin) for x in (q, k))
    cache_write.reference(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    return q.contiguous()
