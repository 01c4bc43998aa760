"""Layers with equal states, bundled so that every bundle's block has the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cache.state import StateSpec


@dataclass(frozen=True)
class Group:
    """Layers that share one block table. Layer layers[j] owns the j-th part of each of the group's blocks."""

    spec: StateSpec
    layers: tuple[int, ...]
    blocks_per_state: int = 1  # recurrent: how many pool blocks one state fills


@dataclass(frozen=True)
class Grouping:
    groups: tuple[Group, ...]
    block_bytes: int  # of every block in the pool
    layers_per_block: int  # parts a block of positions is cut into


def _layers_by_spec(states: Sequence[StateSpec | None]) -> dict[StateSpec, list[int]]:
    by_spec: dict[StateSpec, list[int]] = {}
    for layer, spec in enumerate(states):
        if spec is not None:
            by_spec.setdefault(spec, []).append(layer)
    return by_spec


def _parts(counts: Sequence[int]) -> int:
    """Layers per block: the least padding, each further block table weighing as much as 2 % of the cache."""

    def cost(parts: int) -> float:
        groups = sum(-(-count // parts) for count in counts)
        return groups * parts * (1 + 0.02 * groups)

    return min(range(1, max(counts) + 1), key=lambda parts: (cost(parts), -parts))


def group_layers(states: Sequence[StateSpec | None], block_size: int) -> Grouping:
    """Cut the layers into groups. A layer without state (None) is in no group."""
    by_spec = _layers_by_spec(states)
    kept = {spec: layers for spec, layers in by_spec.items() if spec.kind != "recurrent"}
    parts = _parts([len(layers) for layers in kept.values()]) if kept else 1
    block_bytes = max((spec.bytes_per_position for spec in kept), default=0) * block_size * parts
    groups = []
    for spec, layers in by_spec.items():
        if spec.kind == "recurrent":
            block_bytes = block_bytes or spec.bytes_per_state
            state_bytes = spec.bytes_per_state * len(layers)
            groups.append(Group(spec, tuple(layers), max(1, -(-state_bytes // block_bytes))))
            continue
        for start in range(0, len(layers), parts):
            groups.append(Group(spec, tuple(layers[start : start + parts])))
    return Grouping(tuple(groups), block_bytes, parts)
