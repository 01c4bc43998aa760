"""Pipeline stages: runs of a model's layers, each on ranks of its own, balanced by the values that a step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from penstock.errors import InvalidConfig
from penstock.models.layer import Shapes
from penstock.models.spec import ModelSpec

TOKENS = "embedding.tokens."


@dataclass(frozen=True)
class Stage:
    """`layers` of a model that has `num_layers`. The first stage embeds, the last one has the head."""

    layers: range
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers

    def cut(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec of these layers alone, beside embedding and head."""
        return replace(spec, layers=spec.layers[self.layers.start : self.layers.stop])

    def holds(self, parameter: str, spec: ModelSpec) -> bool:
        """Return True if ranks of this stage have the parameter."""
        part, _, rest = parameter.partition(".")
        if part == "layers":
            return int(rest.partition(".")[0]) in self.layers
        if part != "embedding":
            return self.is_last
        is_head = spec.head is not None and spec.head.tied and parameter.startswith(TOKENS)
        return self.is_first or self.is_last and is_head

    def parameters(self, spec: ModelSpec) -> Shapes:
        return {name: shape for name, shape in spec.parameters().items() if self.holds(name, spec)}


def whole(spec: ModelSpec) -> Stage:
    return Stage(range(spec.num_layers), spec.num_layers)


def cut_stages(spec: ModelSpec, num_stages: int) -> list[Stage]:
    """Cut the layers into stages whose steps take about as long: the longest of them is as short as can be."""
    if num_stages > spec.num_layers:
        raise InvalidConfig(
            f"pipeline_parallel_size={num_stages} is over the model's {spec.num_layers} layers: set at most "
            f"{spec.num_layers}"
        )
    costs = [sum(prod(shape) for shape in layer.parameters().values()) for layer in spec.layers]
    head = spec.head.vocab_size * spec.head.row if spec.head is not None else 0
    ends = [0, *_find_ends((*costs[:-1], costs[-1] + head), num_stages)]
    return [Stage(range(start, stop), spec.num_layers) for start, stop in zip(ends, ends[1:])]


def _find_ends(costs: Sequence[int], num_runs: int) -> list[int]:
    """Cut the costs into runs, none empty, whose largest sum is least; returns the runs' ends."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def find(end: int, runs: int) -> tuple[int, tuple[int, ...]]:
        """The least largest sum of the first `end` costs in so many runs, and their ends."""
        if runs == 1:
            return sums[end], (end,)
        tried = (
            (max(most, sums[end] - sums[start]), (*ends, end))
            for start in range(runs - 1, end)
            for most, ends in (find(start, runs - 1),)
        )
        return min(tried, key=lambda one: one[0])

    return list(find(len(costs), num_runs)[1])
