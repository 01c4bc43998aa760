"""How the cache groups the layers of every family and of known models."""

from __future__ import annotations

import copy

import pytest

from penstock.cache.group import LAYOUTS, group_layers
from penstock.models.memory import LatentMemory
from penstock.models.spec import FAMILIES, spec_from_config
from tests.models.known_configs import KNOWN

CONFIGS = {
    **{name: config for name, (config, _) in KNOWN.items()},
    **{
        f"{name} {number}": {"architectures": [name], **like}
        for name, family in FAMILIES.items()
        for number, like in enumerate(family.like)
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_that_are_alike_are_cut_by_their_count(name: str) -> None:
    """Where all positions take the same bytes, the number of layers of each kind decides alone."""
    spec = spec_from_config(copy.deepcopy(CONFIGS[name]))
    latents = any(isinstance(memory, LatentMemory) for memory in spec.memories())
    for layout in LAYOUTS.values():
        if latents and layout.bits < 16:  # refused
            continue
        states = [state for state in spec.states(layout) if state]
        if len({state.bytes_per_position for state in states}) != 1 or any(state.num_rows for state in states):
            continue
        counts = [states.count(spec) for spec in dict.fromkeys(states)]

        def cost(parts: int, counts: list[int] = counts) -> float:
            groups = sum(-(-count // parts) for count in counts)
            return groups * parts * (1 + 0.02 * groups)

        parts = min(range(1, max(counts) + 1), key=lambda parts: (cost(parts), -parts))
        grouping = group_layers(states, 16)
        assert grouping.block_bytes == states[0].bytes_per_position * 16 * parts
        assert len(grouping.groups) == sum(-(-count // parts) for count in counts)
