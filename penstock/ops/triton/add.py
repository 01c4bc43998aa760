from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.add import add
from penstock.ops.triton.launch import await_others, early
from penstock.ops.triton.sizes import cdiv

BLOCK = 1024


@triton.jit
def _add(x, y, out, x_row, y_row, width, scale, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    a = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y + row * y_row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (a + scale * b).to(out.dtype.element_ty), mask=inside)


@add.impl("cuda", exact=True)
def _body(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel():
        x, y = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, y))
        _add[(num_rows, cdiv(width, BLOCK))](
            x, y, out, x.stride(0), 0 if y.dim() == 1 else y.stride(0), width, scale, BLOCK, num_warps=4, **early(x)
        )
    return out
