"""Ops of a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.elementwise import EXPONENTIAL, ONE_ROUNDING
from penstock.ops.registry import op


@op(tolerance=EXPONENTIAL, rowwise=True)
def route(logits: Tensor, num_chosen: int) -> Tensor:
    """Return softmax over the `num_chosen` largest of each row of logits[T, E], 0 elsewhere → [T, E] float32."""
    weights = torch.zeros(logits.shape, device=logits.device)
    for row, weight in zip(logits.float(), weights):  # alone: torch's exp depends on where in a call a value lies
        top = row.topk(num_chosen)
        weight[top.indices] = top.values.softmax(dim=0)
    return weights


@op(tolerance=ONE_ROUNDING, rowwise=True)
def add_rows(x: Tensor, at: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return x[T, C] with weights[M] · y[M, C] added to its rows at[M], each row once at most."""
    x = x.clone()
    x[at] = (x[at].float() + weights[:, None] * y.float()).to(x.dtype)
    return x
