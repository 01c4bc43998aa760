"""Mixture of experts: each token goes through a few of many gated MLPs, and through a shared one if there is one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from penstock.layers.ffn import GatedMlp
from penstock.layers.linear import Linear, Stack
from penstock.layers.step import StepInputs
from penstock.ops import OpTable, RouterRule


class Router:
    """Chooses experts by rule(linear(x)), and says with which weights."""

    def __init__(self, ops: OpTable, linear: Linear, rule: RouterRule, bias: Tensor | None = None) -> None:
        self.ops, self.linear, self.rule = ops, linear, rule
        self.bias = bias  # [E], added to scores for the choice alone

    def __call__(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        ids, weights = self.ops.route(self.linear(x, step), self.bias, self.rule)
        return ids, weights


class Experts:
    """Σ weight · down(act(gate(x)) · up(x)) over the experts that the router chooses,
    + sigmoid(shared_gate(x)) · shared(x)."""

    def __init__(
        self,
        ops: OpTable,
        router: Router,
        gate_up: Stack,
        down: Stack,
        activation: str,
        shared: GatedMlp | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        self.ops, self.router, self.gate_up, self.down, self.activation = ops, router, gate_up, down, activation
        self.shared, self.shared_gate = shared, shared_gate

    def route(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what the chosen experts get, [T, C] or [T, K, C]; their ids; and the weights of their results."""
        return x, *self.router(x, step)

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        rows, ids, weights = self.route(x, step)
        hidden = self.ops.gated_activation(self.gate_up(rows, ids), self.activation)
        shared = None if self.shared is None else self.shared(x, step)
        gate = None if self.shared_gate is None else self.shared_gate(x, step)
        return self.ops.combine(self.down(hidden, ids), weights, shared, gate)

    def stacks(self) -> tuple[Stack, Stack]:
        return self.gate_up, self.down

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield "router", self.router.linear
        if self.shared is not None:
            yield from ((f"shared.{name}", linear) for name, linear in self.shared.linears())
        if self.shared_gate is not None:
            yield "shared_gate", self.shared_gate


class WeighedInputExperts(Experts):
    """Σ down(act(gate(weight · x)) · up(weight · x)): a token is weighed before its experts instead of after them."""

    def __init__(self, plain: Experts) -> None:
        vars(self).update(vars(plain))

    def route(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        ids, weights = self.router(x, step)
        return self.ops.weigh(x, weights), ids, None
