"""From hidden states to logits."""

from __future__ import annotations

from torch import Tensor

from penstock import ops
from penstock.layers.linear import Linear
from penstock.quant.scheme import Scheme


class Head:
    def __init__(
        self,
        rows: Scheme,
        project: Linear | None = None,
        bias: Tensor | None = None,
        divisor: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        self.rows, self.project, self.bias = rows, project, bias
        self.factor, self.softcap = 1.0 / divisor, softcap

    def __call__(self, x: Tensor) -> Tensor:
        """x[M, C] → [M, V]"""
        logits = self.rows.matmul(x if self.project is None else self.project(x))
        if self.bias is not None:
            logits = ops.add(logits, self.bias)
        if self.factor != 1.0:
            logits = ops.scale(logits, self.factor)
        return ops.softcap(logits, self.softcap) if self.softcap else logits
