from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.cache import cache_arguments
from penstock.ops.cpu.library import Kernel, float32, integers, pointer, rows
from penstock.ops.cpu.norm import check_parameter
from penstock.ops.qkv_write import over_source, qkv_write

_kernel = Kernel("qkv_write", "pnpnpnpnpnippppfppnnnnnnnnp")


def _angles(name: str, angles: Tensor | None) -> Tensor | None:
    return None if angles is None else float32(name, angles).contiguous()


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
    if source is not None:  # of a GPU's products; a CPU's norm their rows themselves
        qkv = over_source(qkv, source, source_eps)
    caches = cache_arguments(k_cache, v_cache, k_scale, v_scale)
    qkv, slots, positions = rows("qkv", qkv), integers(slots, torch.int64), integers(positions, torch.int64)
    num_blocks, num_kv_heads, head_size, size = k_cache.shape
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // head_size - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] % head_size or slots.shape != (num_tokens,) or positions.shape != (num_tokens,):
        raise ValueError(
            f"qkv {tuple(qkv.shape)}, slots {tuple(slots.shape)} and positions {tuple(positions.shape)} "
            f"do not fit caches {tuple(k_cache.shape)}"
        )
    q_norm = None if q_norm is None else check_parameter("q_norm", q_norm, head_size)
    k_norm = None if k_norm is None else check_parameter("k_norm", k_norm, head_size)
    cos, sin = _angles("cos", cos), _angles("sin", sin)
    length, half = (0, 0) if cos is None else cos.shape
    if (
        (cos is None) != (sin is None)
        or (cos is not None and sin is not None and cos.shape != sin.shape)
        or 2 * half > head_size
    ):
        raise ValueError(
            f"cos {None if cos is None else tuple(cos.shape)} and "
            f"sin {None if sin is None else tuple(sin.shape)} do not fit heads of {head_size}"
        )
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
