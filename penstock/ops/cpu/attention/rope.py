from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.rope import rope
from penstock.ops.cpu.runtime.library import Kernel, as_integers, check_float32, empty_like

_kernel = Kernel("rope", "pnnnnnpnppnip")


@rope.impl("cpu", exact=True)
def _rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    check_float32("x", x)
    x, positions = x if x.stride(2) == 1 else x.contiguous(), as_integers(positions, torch.int64)
    cos, sin = check_float32("cos", cos).contiguous(), check_float32("sin", sin).contiguous()
    num_tokens, num_heads, head_size = x.shape
    if cos.shape != sin.shape or 2 * cos.shape[1] > head_size or positions.shape != (num_tokens,):
        raise ValueError(
            f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} and positions {tuple(positions.shape)} "
            f"do not fit x {tuple(x.shape)}"
        )
    out = empty_like(x)
    _kernel(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        num_tokens,
        num_heads,
        head_size,
        positions.data_ptr(),
        cos.shape[0],
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        interleaved,
        out.data_ptr(),
    )
    return out
