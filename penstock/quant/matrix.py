"""Full-precision storage on a GPU: rows as the checkpoint has them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock import ops
from penstock.ops.product import defers, is_few
from penstock.quant.scheme import RmsNorm

FOLDED_ROWS = 4096  # at a time
LEAST_EPS = 1e-30  # a product without a norm has 0


class Matrix:
    """A weight [O, C], its bias [O] in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_out, self.num_in = weight.shape
        self.weight = weight.contiguous()
        self.bias = None if bias is None else bias.float().contiguous()

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def matmul(
        self, x: Tensor, residual: Tensor | None = None, activation: str | None = None, norm: RmsNorm | None = None
    ) -> Tensor:
        return ops.product(x, self.weight, self.bias, residual, activation, False, *norm_parts(norm))

    def unnormed(self, x: Tensor, norm: RmsNorm) -> tuple[Tensor, float] | None:
        """The product of a few rows with its norm left to whoever reads it, and that norm's eps; None for others."""
        weight, eps = norm_parts(norm)
        deferred = defers(x, weight, self.bias, eps) and not is_few(x, self.weight, weight)
        return (ops.product(x, self.weight), eps) if deferred else None

    def gated(self, x: Tensor, activation: str, norm: RmsNorm | None = None) -> Tensor:
        return ops.product(x, self.weight, self.bias, None, activation, True, *norm_parts(norm))

    def fold(self, norm: Tensor) -> None:
        """Multiply each input's column by its weight in the norm before this product."""
        for first in range(0, self.num_out, FOLDED_ROWS):
            rows = self.weight[first : first + FOLDED_ROWS]
            rows.copy_((rows.float() * norm).to(rows.dtype))

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def norm_parts(norm: RmsNorm | None) -> tuple[Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.weight, max(norm.eps, LEAST_EPS))
