"""One matrix product per head, of weights held as rows, as a GPU has them."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """y[t, h] = x[t, h] · weight[h]ᵀ for x[T, H, C] and weight[H, O, C] → [T, H, O]."""
    return torch.einsum("thc,hoc->tho", x.float(), weight.float()).to(x.dtype)
