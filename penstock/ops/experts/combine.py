"""Products of rows and the weights of their experts, and sums of what experts give."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.elementwise import EXPONENTIAL, ONE_ROUNDING
from penstock.ops.registry import op


@op(tolerance=ONE_ROUNDING, rowwise=True)
def weigh(x: Tensor, weights: Tensor) -> Tensor:
    """Return weights[t, k] · x[t] for x[T, C] and weights[T, K] → [T, K, C]."""
    return (x.float()[:, None] * weights[:, :, None]).to(x.dtype)


@op(tolerance=EXPONENTIAL, rowwise=True)
def combine(
    y: Tensor,
    weights: Tensor | None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + (sigmoid(gate) · shared + Σ weights[t, k] · y[t, k]), summed in the order of k, for y[T, K, C],
    weights[T, K] (None: all are 1), shared[T, C] and gate[T, 1] → [T, C]."""
    weights = y.new_ones(y.shape[:2], dtype=torch.float32) if weights is None else weights
    total = y[:, 0].float() * weights[:, 0, None]
    for k in range(1, y.shape[1]):
        total = total + y[:, k].float() * weights[:, k, None]
    if shared is not None:
        total = (shared.float() if gate is None else shared.float() * gate.float().sigmoid()) + total
    return (total if residual is None else residual.float() + total).to(y.dtype)
