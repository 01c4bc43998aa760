"""The sum of what a row's experts give."""

from __future__ import annotations

from torch import Tensor

from penstock.ops.elementwise import EXPONENTIAL
from penstock.ops.registry import op


@op(tolerance=EXPONENTIAL, rowwise=True)
def combine(
    y: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return residual + (sigmoid(gate) · shared + Σ weights[t, k] · y[t, k]), summed in the order of k, for y[T, K, C],
    weights[T, K], shared[T, C] and gate[T, 1] → [T, C]."""
    total = y[:, 0].float() * weights[:, 0, None]
    for k in range(1, y.shape[1]):
        total = total + y[:, k].float() * weights[:, k, None]
    if shared is not None:
        total = (shared.float() if gate is None else shared.float() * gate.float().sigmoid()) + total
    return (total if residual is None else residual.float() + total).to(y.dtype)
