from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.attention import Work
from penstock.ops.attention.encoder_attention import encoder_attention
from penstock.ops.cpu.runtime.library import Kernel, as_integers, as_rows, empty_like

_kernel = Kernel("encoder_attention", "pnpnpnpnnnfp")


@encoder_attention.impl("cpu", exact=True)
def _encoder_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float, work: Work | None = None
) -> Tensor:
    q, k, v = as_rows("q", q), as_rows("k", k), as_rows("v", v)
    query_start = as_integers(query_start, torch.int32)
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must be alike")
    out = empty_like(q)
    _kernel(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        query_start.data_ptr(),
        query_start.shape[0] - 1,
        q.shape[1],
        q.shape[2],
        scale,
        out.data_ptr(),
    )
    return out
