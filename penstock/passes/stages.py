"""Pipeline stages: runs of a model's layers, balanced by the values that a token goes through, the head's included."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

from penstock.errors import InvalidConfig
from penstock.models.experts import Experts
from penstock.models.spec import AnyBlock, ModelSpec


def cut_stages(spec: ModelSpec, num_stages: int) -> list[range]:
    """Cut the layers into stages whose steps take about as long: the longest of them is as short as can be."""
    if num_stages > spec.num_layers:
        raise InvalidConfig(
            f"pipeline_parallel_size={num_stages} is over the model's {spec.num_layers} layers: set at most "
            f"{spec.num_layers}"
        )
    costs = [_count_active(layer) for layer in spec.layers]
    head = spec.head.vocab_size * spec.head.row if spec.head is not None else 0
    ends = [0, *_find_ends((*costs[:-1], costs[-1] + head), num_stages)]
    return [range(start, stop) for start, stop in zip(ends, ends[1:])]


def _count_active(layer: AnyBlock) -> int:
    """Count the values of a layer that one token goes through: of experts those that it is given."""
    idle = layer.ffn.count_idle() if isinstance(layer.ffn, Experts) else 0
    return sum(prod(shape) for shape in layer.parameters().values()) - idle


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
