"""The feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor

from penstock import ops
from penstock.layers.linear import Linear


class Mlp:
    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(ops.activation(self.up(x), self.activation))


class GatedMlp:
    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(ops.gated_activation(self.gate_up(x), self.activation))
