"""Full-precision storage: panels of 16 outputs on a CPU, rows as the checkpoint has them on a GPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.ops import OpTable, pack_panels
from penstock.ops.matmul.epilogue import Epilogue
from penstock.quant.scheme import StoredWeight


class Dense(StoredWeight):
    """A weight as panels."""

    def __init__(self, ops: OpTable, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(ops, weight.shape, bias)
        self.panels = pack_panels(weight)

    def matmul(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.panels, self.num_out, Epilogue(self.bias))

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        return self.ops.grouped_matmul(x, self.panels, ids, num_matrices, Epilogue(self.bias))

    def rows(self, ids: Tensor) -> Tensor:
        return self.ops.embedding(ids, self.panels, self.num_in)


class Matrix(StoredWeight):
    """A weight as rows."""

    def __init__(self, ops: OpTable, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(ops, weight.shape, bias)
        self.weight = weight.contiguous()

    def matmul(self, x: Tensor) -> Tensor:
        return self.ops.product(x, self.weight, Epilogue(self.bias))

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        return self.ops.grouped_product(x, self.weight, ids, num_matrices, Epilogue(self.bias))

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def dense(ops: OpTable, weight: Tensor, bias: Tensor | None = None) -> Dense | Matrix:
    """Store a matrix in full precision, as the weight's device reads it best."""
    return Dense(ops, weight, bias) if weight.is_cpu else Matrix(ops, weight, bias)
