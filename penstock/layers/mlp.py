"""The feed-forward half of a block; `norm` is applied to x first."""

from __future__ import annotations

from torch import Tensor

from penstock.layers.linear import Linear, ready
from penstock.layers.norm import Norm
from penstock.quant.fp8 import Fp8


class Mlp:
    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        return self.down(self.up(x, activation=self.activation, norm=norm), residual)


class GatedMlp:
    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        first, second = self.gate_up.scheme, self.down.scheme
        if isinstance(first, Fp8) and isinstance(second, Fp8):
            x, norm = ready(x, norm)
            return first.mlp(x, self.activation, second, residual, norm)
        return self.down(self.gate_up.gated(x, self.activation, norm), residual)
