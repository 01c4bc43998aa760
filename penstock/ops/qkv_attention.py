"""From a decoder's joint projection to what attention makes of it, for sequences with one query each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.attention import Work, attention, paged
from penstock.ops.example import normal
from penstock.ops.product import FEW_ROWS
from penstock.ops.qkv_write import qkv_write
from penstock.ops.registry import Example, op, takes_exact
from penstock.ops.rows import EachSlot


def _example(
    seed: int,
    lengths: list[int],
    num_heads: int,
    num_kv_heads: int,
    size: int,
    rotated: int = 0,
    normed: str = "",
    source: int = 0,
    **extra: object,
) -> Example:
    example = paged(seed, [(1, length) for length in lengths], num_heads, num_kv_heads, size, **extra)  # type: ignore[arg-type]
    del example["q"], example["query_start"]
    block_size, positions = example["k_cache"].shape[3], example["lengths"].long() - 1
    blocks = example["table"].gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
    example |= {
        "qkv": normal(seed + 5, len(lengths), (num_heads + 2 * num_kv_heads) * size),
        "positions": positions,
        "slots": blocks * block_size + positions % block_size,
        "eps": 1e-6,
        "num_parts": 1 + seed % 3,
    }
    example |= {f"{name}_norm": normal(seed + 6, size) for name in normed}
    if source:
        example |= {"source": normal(seed + 7, len(lengths), source, scale=3.0), "source_eps": 1e-5}
    if rotated:
        angles = normal(seed + 8, max(lengths), rotated // 2, scale=2.0)
        example |= {"cos": angles.cos(), "sin": angles.sin()}
    return {"qkv": example.pop("qkv"), **example}


def _examples() -> Iterator[Example]:
    yield _example(0, [1, 40, 17, 130], 9, 3, 64, rotated=64)
    yield _example(1, [33, 200, 1], 4, 2, 128, rotated=128, normed="qk")
    yield _example(2, [70, 5], 4, 1, 80, rotated=32, normed="q", window=33, block=8)
    yield _example(3, [90, 64, 65], 4, 4, 33, normed="k", softcap=20.0)
    yield _example(4, [77, 12], 6, 2, 24, alibi=torch.linspace(0.01, 0.5, 6), source=1500)
    for seed, dtype in ((5, torch.bfloat16), (6, torch.float16)):
        yield _example(seed, [100, 31, 16, 48], 8, 2, 64, rotated=64, normed="qk", source=64, dtype=dtype)
        yield _example(seed + 2, [700, 1], 2, 1, 256, rotated=256, dtype=dtype)


def is_joined(work: Work, window: int) -> bool:
    """Whether a step has one query of each of a few sequences, and none of them positions that are read for several:
    then its queries need not be written anywhere. With many of them a kernel that does all of it is slower."""
    return (
        1 < work.num_single <= FEW_ROWS
        and work.tiles is None
        and (work.shared is None or window > 0)
        and not takes_exact()
    )


@op(
    tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3},
    examples=_examples,
    rows=EachSlot("qkv", "slots", "positions", "table", "lengths", "source"),
)
def qkv_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    source: Tensor | None = None,
    source_eps: float = 0.0,
    num_parts: int = 1,
) -> Tensor:
    """qkv[S, (H + 2 K) · D] of the last positions of S sequences → [S, H, D]: `qkv_write`, then `attention`.

    A sequence of length 0 is nobody's: what it gets is of no use. Keys may be read in `num_parts` parts at once.
    """
    q = qkv_write.reference(
        qkv, k_cache, v_cache, slots, positions, q_norm, k_norm, eps, cos, sin, None, None, source, source_eps
    )
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return attention.reference(q, k_cache, v_cache, table, starts, lengths, scale, window, softcap, alibi)
