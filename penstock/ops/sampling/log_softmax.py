"""Log probabilities of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import op


@op(tolerance={torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3})
def log_softmax(x: Tensor) -> Tensor:
    """x - log(sum(exp(x))) over the last dimension of x[S, V]."""
    return torch.log_softmax(x.float(), dim=-1).to(x.dtype)
