"""From hidden states to logits."""

from __future__ import annotations

from torch import Tensor

from penstock.ops import OpTable
from penstock.quant.scheme import Scheme


class Head:
    def __init__(
        self,
        ops: OpTable,
        rows: Scheme,
        project: Scheme | None = None,
        bias: Tensor | None = None,
        divisor: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        self.ops, self.rows, self.project, self.bias = ops, rows, project, bias
        self.factor, self.softcap = 1.0 / divisor, softcap

    def __call__(self, x: Tensor) -> Tensor:
        """x[M, C] → logits [M, V]."""
        return self.finish(self.rows.matmul(x if self.project is None else self.project.matmul(x)))

    def finish(self, logits: Tensor) -> Tensor:
        """Add the bias to the product with the vocabulary, divide and cap it."""
        if self.bias is not None:
            logits = self.ops.add(logits, self.bias)
        if self.factor != 1.0:
            logits = self.ops.scale(logits, self.factor)
        return self.ops.softcap(logits, self.softcap) if self.softcap else logits
