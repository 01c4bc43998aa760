"""From token ids to the residual stream."""

from __future__ import annotations

from torch import Tensor

from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.layers.step import StepInputs
from penstock.ops import OpTable
from penstock.quant.scheme import Scheme


class Embedding:
    def __init__(
        self,
        ops: OpTable,
        tokens: Scheme,
        project: Linear | None = None,
        scale: float = 1.0,
        positions: Scheme | None = None,
        first_type: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        self.ops, self.tokens, self.project, self.scale = ops, tokens, project, scale
        self.positions, self.norm = positions, norm
        self.first_type = first_type  # [C], the row of token type 0

    def rows(self, step: StepInputs) -> Tensor:
        return self.tokens.rows(step.ids)

    def __call__(self, step: StepInputs) -> Tensor:
        x = self.rows(step)
        if self.project is not None:
            x = self.project(x, step)
        if self.scale != 1.0:
            x = self.ops.scale(x, self.scale)
        if self.first_type is not None:
            x = self.ops.add(x, self.first_type)
        if self.positions is not None:
            x = self.ops.add(x, self.positions.rows(step.positions))
        return x if self.norm is None else self.norm(x)
