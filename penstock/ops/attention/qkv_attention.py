"""From a decoder's joint projection to what attention makes of it, for sequences with one query each."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.attention import Work, attention
from penstock.ops.attention.qkv_write import qkv_write
from penstock.ops.registry import op
from penstock.ops.triton.tuning import MAX_FUSED_QKV_ROWS


def is_joined(work: Work, window: int) -> bool:
    """Return True if one fused kernel is faster: a few decode rows without a shared prefix. It writes no queries."""
    return 1 < work.num_single <= MAX_FUSED_QKV_ROWS and work.tiles is None and (work.shared is None or window > 0)


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
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
    num_kv_splits: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:
    """qkv[S, (H + 2 K) · D] of the last positions of S sequences → [S, H, D]: `qkv_write`, then `attention`.

    Length 0 marks a padding row; its output is undefined. Keys may be read in `num_kv_splits` splits at once.
    """
    q = qkv_write.reference(
        qkv, k_cache, v_cache, slots, positions, q_norm, k_norm, eps, cos, sin, None, None, source, source_eps
    )
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return attention.reference(q, k_cache, v_cache, table, starts, lengths, scale, window, softcap, alibi, sinks=sinks)
