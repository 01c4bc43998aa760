"""Add to the outputs of linears: the seam of adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock import layers
from penstock.models.decoder import Decoder, Encoder, linears
from penstock.ops import OpTable

Delta = Callable[[Tensor, layers.StepInputs], Tensor]  # x[T, C] → [T, O]
Deltas = Callable[[str, layers.Linear], Delta | None]  # by a linear's name


class AdaptedLinear(layers.Linear):
    """linear(x) + delta(x)"""

    def __init__(self, ops: OpTable, linear: layers.Linear, delta: Delta) -> None:
        super().__init__(linear.scheme)
        self.ops, self.linear, self.delta = ops, linear, delta

    def __call__(self, x: Tensor, step: layers.StepInputs) -> Tensor:
        return self.ops.add(self.linear(x, step), self.delta(x, step))


def adapt(model: Decoder | Encoder, deltas: Deltas) -> None:
    """Wrap the linears that `deltas` has a delta for. No rule of `lower` matches them: they run plain."""
    for name, linear, part in linears(model):
        delta = deltas(name, linear)
        if delta is not None:
            _swap(part, linear, AdaptedLinear(model.ops, linear, delta))


def _swap(part: Any, old: layers.Linear, new: layers.Linear) -> None:
    """Put `new` where a mixer or FFN holds `old`, by itself or in a list."""
    for name, value in vars(part).items():
        if value is old:
            setattr(part, name, new)
        elif isinstance(value, list) and old in value:
            value[value.index(old)] = new
