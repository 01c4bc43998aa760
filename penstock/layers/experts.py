"""Mixture of experts: each token goes through a few of many gated MLPs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.layers.linear import Linear
from penstock.layers.step import StepInputs
from penstock.ops import OpTable


class Experts:
    """Σ weight · down(act(gate(x)) · up(x)) over the experts that the router chooses for a token."""

    def __init__(
        self,
        ops: OpTable,
        router: Linear,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        activation: str,
        num_chosen: int,
    ) -> None:
        self.ops, self.router, self.gate_up, self.down = ops, router, list(gate_up), list(down)
        self.activation, self.num_chosen = activation, num_chosen

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """Sum in the order of the experts, so that a token gets the same in any company."""
        y = torch.zeros_like(x)
        weights = self.ops.route(self.router(x, step), self.num_chosen)
        for weight, gate_up, down in zip(weights.unbind(dim=1), self.gate_up, self.down):
            at = weight.nonzero().flatten()
            if len(at):
                hidden = self.ops.gated_activation(gate_up(self.ops.gather(at, x), step), self.activation)
                y = self.ops.add_rows(y, at, down(hidden, step), weight[at])
        return y

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield "router", self.router
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down)):
            yield from ((f"experts.{index}.gate_up", gate_up), (f"experts.{index}.down", down))
