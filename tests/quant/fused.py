"""A scheme's product with a prologue and an epilogue, as `passes/lower` has it."""

from __future__ import annotations

from torch import Tensor

from penstock import layers
from penstock.ops import OpTable
from penstock.passes.lower.products import FusedProduct
from penstock.passes.lower.stages import Branch
from penstock.quant.scheme import Scheme

CPU = OpTable("cpu")


def multiply(
    scheme: Scheme,
    x: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    norm: layers.RmsNorm | None = None,
) -> Tensor:
    branch = None if norm is None else Branch(norm)
    return FusedProduct(layers.Linear(scheme), branch, activation, gated).run(x, residual)
