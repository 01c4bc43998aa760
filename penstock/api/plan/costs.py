"""The cost of a model's tokens: bytes to read, values to multiply, and what each position of a sequence adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from penstock.cache.group import LAYOUTS
from penstock.models.decoder import linears
from penstock.models.experts import Experts
from penstock.models.spec import ModelSpec


@dataclass(frozen=True)
class Matrices:
    """A model's matrices, all layers together."""

    layer_values: int
    layer_bytes: int
    head_values: int
    head_bytes: int
    row_bytes: int  # of one token's embedding
    expert_share: float = 0.0  # of the layers' values that routers choose among
    chosen_share: float = 1.0  # of those, what one token goes through

    def use_share(self) -> float:
        """Return the share of the layers' values that a token is multiplied with."""
        return 1.0 - self.expert_share * (1.0 - self.chosen_share)

    def touch_share(self, tokens: float) -> float:
        """Return the share of them that a step of so many tokens reads."""
        return 1.0 - self.expert_share * float((1.0 - self.chosen_share) ** max(1.0, tokens))

    @classmethod
    def of(cls, model: Any) -> Matrices:
        """Count those of a decoder or an encoder as it is loaded."""
        schemes = [linear.scheme for _, linear, _ in linears(model)]
        stacks = [stack for block in model.blocks for stack in getattr(block.ffn, "stacks", tuple)()]
        schemes += [stack.scheme for stack in stacks]
        values = sum(scheme.num_out * scheme.num_in for scheme in schemes)
        head, embedded = getattr(model, "head", None), model.embedding.tokens
        return cls(
            values,
            sum(scheme.num_bytes for scheme in schemes),
            head.rows.num_out * head.rows.num_in if head else 0,
            head.rows.num_bytes if head else 0,
            embedded.num_bytes // embedded.num_out,
            *_count_experts(model.spec, values),
        )


def _count_experts(spec: ModelSpec, values: int) -> tuple[float, float]:
    """Return the share of the values that are experts', and the share of experts that a token goes through."""
    of_experts, shares = 0, [1.0]
    for layer in spec.layers:
        if isinstance(layer.ffn, Experts):
            shapes = layer.ffn.parameters()
            of_experts += sum(prod(shape) for name, shape in shapes.items() if name.startswith("experts."))
            shares.append(min(1.0, layer.ffn.routing.num_chosen / layer.ffn.num_experts))
    return min(1.0, of_experts / max(1, values)), min(shares)


@dataclass(frozen=True)
class Memories:
    """Per layer, what a row reads of its past and computes with it."""

    layers: Sequence[tuple[int, int, int, int]]  # bytes a position, window, operations a pair, bytes of a state

    @classmethod
    def of(cls, spec: ModelSpec, kv_dtype: str) -> Memories:
        states = spec.states(LAYOUTS[kv_dtype])
        found = []
        for layer, state in zip(spec.layers, states):
            ops = 4 * getattr(layer.mixer, "num_heads", 0) * getattr(layer.mixer, "head_size", 0)
            if state is None:
                found.append((0, 0, ops, 0))
            else:
                found.append((state.bytes_per_position, state.window, ops, state.bytes_per_state))
        return cls(tuple(found))

    def read_bytes(self, length: float) -> float:
        """Count the bytes that a query at this length reads: positions in reach, or a state, which is written too."""
        return sum(each * _reach(length, window) + 2 * state for each, window, _, state in self.layers)

    def decode_ops(self, length: float) -> float:
        """Count the operations of one query at this length."""
        return sum(ops * _reach(length, window) for _, window, ops, _ in self.layers)

    def prompt_ops(self, length: int) -> float:
        """Count those of a whole prompt."""
        total = 0.0
        for _, window, ops, _ in self.layers:
            reach = int(_reach(length, window))
            total += ops * (reach * (reach + 1) / 2 + (length - reach) * reach)
        return total


def _reach(length: float, window: int) -> float:
    return min(length, window) if window else length
