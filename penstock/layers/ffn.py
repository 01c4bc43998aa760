"""Feed-forward networks: each token by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from penstock.layers.linear import Linear
from penstock.layers.step import StepInputs
from penstock.ops import OpTable


class Ffn(Protocol):
    def __call__(self, x: Tensor, step: StepInputs) -> Tensor: ...

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield the matrices by their names."""


class Mlp:
    """down(act(up(x)))"""

    def __init__(self, ops: OpTable, up: Linear, down: Linear, activation: str) -> None:
        self.ops, self.up, self.down, self.activation = ops, up, down, activation

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        return self.down(self.ops.activation(self.up(x, step), self.activation), step)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield from (("up", self.up), ("down", self.down))


class GatedMlp:
    """down(act(gate(x)) · up(x))"""

    def __init__(self, ops: OpTable, gate_up: Linear, down: Linear, activation: str) -> None:
        self.ops, self.gate_up, self.down, self.activation = ops, gate_up, down, activation

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        return self.down(self.ops.gated_activation(self.gate_up(x, step), self.activation), step)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield from (("gate_up", self.gate_up), ("down", self.down))
