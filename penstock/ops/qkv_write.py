"""From a decoder's joint projection to queries, and keys and values in the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.cache import cache_pool
from penstock.ops.cache_write import cache_write
from penstock.ops.example import integers, normal, permutation
from penstock.ops.registry import Example, op
from penstock.ops.rms_norm import rms_norm
from penstock.ops.rope import rope
from penstock.ops.rows import EachSlot


def _example(
    seed: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    size: int,
    block: int,
    dtype: torch.dtype,
    rotated: int = 0,
    normed: str = "",
) -> Example:
    num_blocks = -(-num_tokens // block) + 2
    angles = normal(seed + 1, 50, rotated // 2, scale=2.0)
    example: Example = {
        "qkv": normal(seed, num_tokens, (num_heads + 2 * num_kv_heads) * size),
        **cache_pool(num_blocks, num_kv_heads, block, size, dtype),
        "slots": permutation(seed, num_blocks * block)[:num_tokens],
        "positions": integers(seed, 50, num_tokens),
        "eps": 1e-6,
    } | {f"{name}_norm": normal(seed + 2, size) for name in normed}
    return example | {"cos": angles.cos(), "sin": angles.sin()} if rotated else example


def _examples() -> Iterator[Example]:
    yield _example(0, 0, 3, 1, 8, 4, torch.float32, rotated=8)
    yield _example(1, 1, 9, 3, 64, 16, torch.float16, rotated=64)
    yield _example(2, 7, 4, 1, 256, 16, torch.float16, rotated=256, normed="qk")
    yield _example(3, 5, 6, 2, 80, 8, torch.bfloat16, rotated=32, normed="q")
    yield _example(4, 70, 9, 3, 64, 16, torch.float32, rotated=64)
    yield _example(5, 13, 4, 4, 33, 1, torch.float16, normed="k")
    yield _example(6, 6, 4, 2, 20, 32, torch.float32)
    yield _example(7, 21, 8, 2, 64, 16, torch.int8, rotated=64, normed="qk")
    yield _example(8, 3, 2, 1, 30, 16, torch.int8, rotated=10)
    for seed, normed in ((9, ""), (10, "qk")):
        yield _example(seed, 7, 8, 2, 64, 16, torch.float32, rotated=64, normed=normed) | {
            "source": normal(seed, 7, 1500, scale=3.0),
            "source_eps": 1e-5,
        }


def over_source(qkv: Tensor, source: Tensor, source_eps: float) -> Tensor:
    """Each row over the root mean square of its source."""
    factor = torch.rsqrt(source.float().square().mean(-1, keepdim=True) + source_eps)
    return (qkv.float() * factor).to(qkv.dtype)


@op(
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.int8: 1.0},
    examples=_examples,
    rows=EachSlot("qkv", "slots", "positions", "source"),
)
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
    num_kv_heads, head_size = k_cache.shape[1:3]
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
