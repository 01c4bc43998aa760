from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.cache import head_size_of
from penstock.ops.attention.qkv_write import over_source, qkv_write
from penstock.ops.cpu.attention.cache import cache_arguments
from penstock.ops.cpu.norm import check_parameter
from penstock.ops.cpu.runtime.library import Kernel, as_integers, as_rows, check_float32, pointer

_kernel = Kernel("qkv_write", "pnpnpnpnpnippppfppnnnnnnnnp")


def _check_angles(cos: Tensor | None, sin: Tensor | None, head_size: int) -> tuple[Tensor | None, Tensor | None]:
    if cos is None and sin is None:
        return None, None
    if cos is None or sin is None or cos.shape != sin.shape or 2 * cos.shape[1] > head_size:
        shapes = (None if angles is None else tuple(angles.shape) for angles in (cos, sin))
        raise ValueError("cos {} and sin {} do not fit heads of {}".format(*shapes, head_size))
    return check_float32("cos", cos).contiguous(), check_float32("sin", sin).contiguous()


@qkv_write.impl("cpu", exact=True)
def _qkv_write(
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
    if source is not None:  # deferred norm: only GPU models ask for it
        qkv = over_source(qkv, source, source_eps)
    caches = cache_arguments(k_cache, v_cache, k_scale, v_scale)
    qkv, slots, positions = as_rows("qkv", qkv), as_integers(slots, torch.int64), as_integers(positions, torch.int64)
    num_blocks, num_kv_heads, _, size = k_cache.shape
    head_size = head_size_of(k_cache)
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // head_size - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] % head_size or slots.shape != (num_tokens,) or positions.shape != (num_tokens,):
        raise ValueError(
            f"qkv {tuple(qkv.shape)}, slots {tuple(slots.shape)} and positions {tuple(positions.shape)} "
            f"do not fit caches {tuple(k_cache.shape)}"
        )
    q_norm = None if q_norm is None else check_parameter("q_norm", q_norm, head_size)
    k_norm = None if k_norm is None else check_parameter("k_norm", k_norm, head_size)
    cos, sin = _check_angles(cos, sin, head_size)
    length, half = (0, 0) if cos is None else cos.shape
    out = qkv.new_empty(num_tokens, num_heads, head_size)
    _kernel(
        qkv.data_ptr(),
        qkv.stride(0),
        *caches,
        slots.data_ptr(),
        positions.data_ptr(),
        pointer(q_norm),
        pointer(k_norm),
        eps,
        pointer(cos),
        pointer(sin),
        length,
        half,
        num_tokens,
        num_blocks,
        num_heads,
        num_kv_heads,
        size,
        head_size,
        out.data_ptr(),
    )
    return out
