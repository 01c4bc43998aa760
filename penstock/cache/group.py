"""The states that layers keep between steps, and groups of layers whose blocks have the same size in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

ALIGNMENT = 4  # bytes: scales are float32


@dataclass(frozen=True)
class KvLayout:
    """`bits` per number, and `scale_bytes` for every `group` numbers of a quantized head (0: for all of them)."""

    bits: int
    scale_bytes: int = 0
    group: int = 0

    def numbers_bytes(self, head_size: int) -> int:
        """Count the bytes of one position of one head, without its scales."""
        return -(-head_size * self.bits // (8 * ALIGNMENT)) * ALIGNMENT

    def scales_bytes(self, head_size: int) -> int:
        """Count the bytes of the scales of one position of one head."""
        return self.scale_bytes * (-(-head_size // self.group) if self.group else 1)

    def position_bytes(self, num_heads: int, head_size: int) -> int:
        """Count the bytes of one position's keys and values, scales included."""
        return 2 * num_heads * (self.numbers_bytes(head_size) + self.scales_bytes(head_size))


LAYOUTS = {
    "float32": KvLayout(32),
    "bfloat16": KvLayout(16),
    "float16": KvLayout(16),
    "int8": KvLayout(8, scale_bytes=4),
    "int4": KvLayout(4, scale_bytes=4, group=32),
    "fp8": KvLayout(8),
}


@dataclass(frozen=True)
class StateSpec:
    """`full` keeps every position, `window` the last `window` positions, `recurrent` one state whatever the length:
    `num_rows` rows of `row_bytes`."""

    kind: Literal["full", "window", "recurrent"]
    bytes_per_position: int = 0  # full, window
    window: int = 0  # window: a query at p sees p-window+1 … p
    num_rows: int = 0  # recurrent
    row_bytes: int = 0

    @property
    def bytes_per_state(self) -> int:
        return self.num_rows * self.row_bytes

    def find_first_needed(self, position: int) -> int:
        """Return the earliest position that a query at `position` or later can still read."""
        if self.kind == "full":
            return 0
        if self.kind == "window":
            return max(0, position - self.window + 1)
        return position

    def find_resumable(self, present: Sequence[bool], block_size: int) -> list[bool]:
        """Say for each prefix of a path (1 block, 2 blocks, …) if this state can resume after it.
        `present[i]`: the path still holds this state's block (or snapshot) i."""
        if self.kind == "recurrent":
            return list(present)
        accepted, run = [], 0
        for index, held in enumerate(present):
            run = run + 1 if held else 0
            needed = index + 1 - self.find_first_needed((index + 1) * block_size) // block_size
            accepted.append(run >= needed)
        return accepted

    def max_blocks(self, length: int, chunk: int, block_size: int) -> int:
        """Bound the blocks that a sequence of `length` holds at once when it computes `chunk` positions a step."""
        whole = -(-length // block_size)
        if self.kind == "window":
            return min(whole, -(-(self.window + chunk) // block_size) + 1)
        return whole


GROUP_PERCENT = 2  # cost of each further block table, as a share of the cache


@dataclass(frozen=True)
class Group:
    """Layers that share one block table. Layer layers[j] owns `part_bytes` from byte j · part_bytes on: of each block,
    or of a recurrent state, whose rows fill `blocks_per_state` blocks and never straddle two."""

    spec: StateSpec
    layers: tuple[int, ...]
    part_bytes: int = 0
    blocks_per_state: int = 1
    ahead: int = 0  # positions beyond a sequence's end that drafting layers may write

    @property
    def is_paged(self) -> bool:
        """True if blocks hold positions, one after the other; a recurrent group has no slots."""
        return self.spec.kind != "recurrent"

    def table_width(self, max_model_len: int, block_size: int) -> int:
        return -(-(max_model_len + self.ahead) // block_size) if self.is_paged else self.blocks_per_state


@dataclass(frozen=True)
class Grouping:
    groups: tuple[Group, ...]
    block_bytes: int  # of every block in the pool


def group_layers(
    states: Sequence[StateSpec | None], block_size: int, num_drafting: int = 0, ahead: int = 0
) -> Grouping:
    """Cut the layers into groups. A layer without state (None) is in no group. The last `num_drafting` layers may write
    `ahead` positions beyond a sequence's end."""
    first_drafting = len(states) - num_drafting
    by_spec: dict[StateSpec, list[int]] = {}
    for layer, spec in enumerate(states):
        if spec is not None:
            by_spec.setdefault(spec, []).append(layer)
    block_bytes = _choose_block_bytes(by_spec, block_size)
    groups = []
    for spec, layers in by_spec.items():
        if not spec.bytes_per_position:
            num_blocks = -(-spec.num_rows * len(layers) // (block_bytes // spec.row_bytes))
            groups.append(Group(spec, tuple(layers), spec.bytes_per_state, num_blocks))
            continue
        part_bytes = spec.bytes_per_position * block_size
        count = block_bytes // part_bytes
        for start in range(0, len(layers), count):
            some = tuple(layers[start : start + count])
            groups.append(Group(spec, some, part_bytes, ahead=ahead if some[-1] >= first_drafting else 0))
    return Grouping(tuple(groups), block_bytes)


def cut_groups(grouping: Grouping, layers: range, states: Sequence[StateSpec | None], block_size: int) -> Grouping:
    """Keep some layers, numbered from 0, in the same groups with the same tables. `states` describes all layers as
    this rank keeps them; blocks are as large as its own need."""
    groups, block_bytes = [], ALIGNMENT
    for group in grouping.groups:
        kept = tuple(layer - layers.start for layer in group.layers if layer in layers)
        spec = states[group.layers[0]]
        assert spec is not None
        part_bytes = spec.bytes_per_position * block_size if group.is_paged else spec.bytes_per_state
        num_bytes = part_bytes * len(kept)
        if not group.is_paged:
            num_bytes = -(-spec.num_rows * len(kept) // group.blocks_per_state) * spec.row_bytes
        groups.append(replace(group, spec=spec, layers=kept, part_bytes=part_bytes))
        block_bytes = max(block_bytes, num_bytes)
    return Grouping(tuple(groups), block_bytes)


def _choose_block_bytes(by_spec: dict[StateSpec, list[int]], block_size: int) -> int:
    """Find the block size that takes the least memory, given that it holds a layer or a row of every spec."""
    parts = [(spec.bytes_per_position * block_size, len(layers)) for spec, layers in by_spec.items()]
    paged = [(part, count) for part, count in parts if part]
    if not paged:
        return max((spec.bytes_per_state for spec in by_spec), default=0)
    smallest = max([part for part, _ in paged] + [spec.row_bytes for spec in by_spec])

    def cost(block_bytes: int) -> tuple[int, int]:
        num_groups = sum(-(-count // (block_bytes // part)) for part, count in paged)
        return num_groups * block_bytes * (100 + GROUP_PERCENT * num_groups), -block_bytes

    first = {part: -(-smallest // part) for part, _ in paged}
    sizes = [part * n for part, count in paged for n in range(first[part], max(first[part], count) + 1)]
    return min(sizes, key=cost)
