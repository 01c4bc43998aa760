"""Adapters on stacks of matrices: those of experts, and those that latent attention has for each head."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from penstock import layers
from penstock.ops import LoraWeights, OpTable
from penstock.passes.lora_table import LoraTable


class AdaptedExperts(layers.Experts):
    """Experts whose matrices may have adapters. The first product is not gated, since they are added to its outputs."""

    def __init__(self, experts: layers.Experts, table: LoraTable, name: str) -> None:
        vars(self).update(vars(experts))
        self.plain = copy.copy(experts)
        self.router = self.plain.router = copy.copy(experts.router)
        self.shared = copy.copy(experts.shared)
        stacks = {"gate_up": experts.gate_up, "down": experts.down}
        self.added: dict[str, LoraWeights] = {}
        for own, stack in stacks.items():
            count, scheme = stack.num_matrices, stack.scheme
            made = table.make(f"{name}.experts.{own}", scheme.num_out // count, scheme.num_in, scheme, count)
            self.added[own] = made

    def route(self, x: Tensor, step: layers.StepInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.plain.route(x, step)

    def __call__(self, x: Tensor, step: layers.StepInputs) -> Tensor:
        rows, ids, weights = self.route(x, step)
        hidden = self._add("gate_up", rows, self.gate_up(rows, ids), ids, step.adapters)
        hidden = self.ops.gated_activation(hidden, self.activation)
        shared = None if self.shared is None else self.shared(x, step)
        gate = None if self.shared_gate is None else self.shared_gate(x, step)
        y = self._add("down", hidden, self.down(hidden, ids), ids, step.adapters)
        return self.ops.combine(y, weights, shared, gate)

    def _add(self, own: str, x: Tensor, y: Tensor, ids: Tensor, adapters: Any) -> Tensor:
        return y if adapters is None else self.ops.add_grouped_lora(x, y, adapters, self.added[own], ids)


class AdaptedHeads:
    """A matrix of its own for each head, which may have adapters."""

    def __init__(self, ops: OpTable, heads: Any, weights: LoraWeights) -> None:
        self.ops, self.heads, self.weights = ops, heads, weights

    def __call__(self, x: Tensor, step: layers.StepInputs) -> Tensor:
        y = self.heads(x, step)
        return y if step.adapters is None else self.ops.add_grouped_lora(x, y, step.adapters, self.weights)


def adapt_heads(latent: layers.LatentAttention, described: Any, table: LoraTable, name: str) -> None:
    """Adapt what latent attention absorbs: kv_b, by its halves."""
    count, nope, rank, value = described.num_heads, described.nope_size, described.rank, described.value_size
    key = table.make(f"{name}.kv_b.key", rank, nope, num_matrices=count)
    out = table.make(f"{name}.kv_b.value", value, rank, num_matrices=count)
    latent.absorb_key = AdaptedHeads(latent.ops, latent.absorb_key, key)
    latent.expand_value = AdaptedHeads(latent.ops, latent.expand_value, out)
