"""One matrix product per head, of panels on a CPU, of rows on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.matmul.linear import pack_panels, unpack_panels
from penstock.ops.registry import op


def pack_heads(weights: Tensor) -> Tensor:
    """[H, O, C] → [H, ceil(O/16), C, 16], each head as `pack_panels` does it."""
    return torch.stack([pack_panels(weight) for weight in weights])


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def head_linear(x: Tensor, panels: Tensor, num_out: int) -> Tensor:
    """y[t, h] = x[t, h] · weight[h]ᵀ for x[T, H, C] → [T, H, O]; sums are float32, over C in order."""
    weights = torch.stack([unpack_panels(each, num_out) for each in panels]).float()
    return torch.einsum("thc,hoc->tho", x.float(), weights).to(x.dtype)


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """y[t, h] = x[t, h] · weight[h]ᵀ for x[T, H, C] and weight[H, O, C] → [T, H, O]."""
    return torch.einsum("thc,hoc->tho", x.float(), weight.float()).to(x.dtype)
