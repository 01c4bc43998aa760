"""The cost of a model's tokens: bytes to read, values to multiply, and what each position of a sequence adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock import layers
from penstock.cache.group import LAYOUTS
from penstock.models.decoder import linears
from penstock.models.latent import LatentAttentionSpec
from penstock.models.spec import ModelSpec
from penstock.passes.outline import tensors_of


@dataclass(frozen=True)
class ExpertStacks:
    """The experts of one layer, all of them together."""

    values: int
    num_bytes: int
    chosen_share: float  # of the experts that one token goes through

    def touch_share(self, tokens: float) -> float:
        """Return the share of the experts that so many tokens meet if they are routed evenly."""
        return 1.0 - float((1.0 - self.chosen_share) ** max(1.0, tokens))


@dataclass(frozen=True)
class Matrices:
    """A model's matrices, all layers together."""

    layer_values: int
    layer_bytes: int
    head_values: int
    head_bytes: int
    row_bytes: int  # of one token's embedding
    experts: tuple[ExpertStacks, ...] = ()  # of these layers' values and bytes

    def used_values(self) -> float:
        """Count the layers' values that one token is multiplied with."""
        return self.layer_values - sum(each.values * (1.0 - each.chosen_share) for each in self.experts)

    def touched_bytes(self, tokens: float) -> float:
        """Count the layers' bytes that a step of so many tokens reads."""
        return self.layer_bytes - sum(each.num_bytes * (1.0 - each.touch_share(tokens)) for each in self.experts)

    @classmethod
    def of(cls, model: Any) -> Matrices:
        """Count those of a decoder or an encoder as it is loaded."""
        schemes = [linear.scheme for _, linear, _ in linears(model)]
        experts = tuple(_count_experts(block.ffn) for block in model.blocks if isinstance(block.ffn, layers.Experts))
        absorbed = [_count_absorbed(block.mixer) for block in model.blocks]
        head, embedded = getattr(model, "head", None), model.embedding.tokens
        return cls(
            sum(map(_count_values, schemes)) + sum(each.values for each in experts) + sum(n for n, _ in absorbed),
            sum(scheme.num_bytes for scheme in schemes)
            + sum(each.num_bytes for each in experts)
            + sum(size for _, size in absorbed),
            _count_values(head.rows) if head else 0,
            head.rows.num_bytes if head else 0,
            embedded.num_bytes // embedded.num_out,
            experts,
        )


def _count_values(scheme: Any) -> int:
    return int(scheme.num_out * scheme.num_in)


def _count_experts(ffn: layers.Experts) -> ExpertStacks:
    schemes = [stack.scheme for stack in ffn.stacks()]
    share = ffn.router.rule.num_chosen / ffn.gate_up.num_matrices
    return ExpertStacks(sum(map(_count_values, schemes)), sum(scheme.num_bytes for scheme in schemes), share)


def _count_absorbed(mixer: Any) -> tuple[int, int]:
    """Count the values and bytes of the matrices that latent attention multiplies head by head."""
    if not isinstance(mixer, layers.LatentAttention):
        return 0, 0
    tensors = [*tensors_of(mixer.absorb_key), *tensors_of(mixer.expand_value)]
    return sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Memories:
    """Per layer, what a row reads of its past and computes with it."""

    layers: Sequence[tuple[int, int, int, int]]  # bytes a position, window, operations a pair, bytes of a state

    @classmethod
    def of(cls, spec: ModelSpec, kv_dtype: str) -> Memories:
        states = spec.states(LAYOUTS[kv_dtype])
        found = []
        for layer, state in zip(spec.layers, states):
            ops = _count_pair_ops(layer.mixer)
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


def _count_pair_ops(mixer: Any) -> int:
    """Count the operations of a query and one position, of all heads: its score, and its weighted value."""
    if isinstance(mixer, LatentAttentionSpec):
        return 2 * mixer.num_heads * (2 * mixer.rank + mixer.rope_size)
    return 4 * getattr(mixer, "num_heads", 0) * getattr(mixer, "head_size", 0)


def _reach(length: float, window: int) -> float:
    return min(length, window) if window else length
