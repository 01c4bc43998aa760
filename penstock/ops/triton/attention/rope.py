from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.attention.rope import rope
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.sizes import power_of_2


@triton.jit
def _rope(
    x,
    positions,
    cos,
    sin,
    out,
    x_strides,
    num_heads,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate one head of one token: each value with its partner HALF away, or with its neighbour."""
    wait_for_previous(PDL)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside, rotated = at < SIZE, at < 2 * HALF
    line = x + t * x_strides[0] + h * x_strides[1]
    if INTERLEAVED:
        first = at % 2 == 0
        partner, place = tl.where(first, at + 1, at - 1), at // 2
    else:
        first = at < HALF
        partner, place = tl.where(first, at + HALF, at - HALF), tl.where(first, at, at - HALF)
    own = tl.load(line + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(line + partner, mask=rotated, other=0.0).to(tl.float32)
    angle = tl.load(positions + t) * HALF + place
    c = tl.load(cos + angle, mask=rotated, other=1.0)
    s = tl.load(sin + angle, mask=rotated, other=0.0)
    y = own * c + tl.where(first, -other, other) * s
    tl.store(out + (t * num_heads + h) * SIZE + at, y.to(out.dtype.element_ty), mask=inside)


@rope.impl("cuda", exact=True)
def _body(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    num_tokens, num_heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = x if x.stride(2) == 1 else x.contiguous()
        _rope[(num_tokens, num_heads)](
            x,
            positions,
            cos,
            sin,
            out,
            x.stride()[:2],
            num_heads,
            cos.shape[1],
            size,
            power_of_2(size),
            interleaved,
            num_warps=1,
            **pdl_options(x),
        )
    return out
