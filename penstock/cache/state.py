"""What a layer must remember between steps, and which cached prefixes it can resume from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StateSpec:
    """`full` keeps every position, `window` the last `window` positions, `recurrent` one state whatever the length."""

    kind: Literal["full", "window", "recurrent"]
    bytes_per_position: int = 0  # full, window
    window: int = 0  # window: a query at p sees p-window+1 … p
    bytes_per_state: int = 0  # recurrent

    def first_needed(self, position: int) -> int:
        """The earliest position that a query at `position` or later can still read."""
        if self.kind == "full":
            return 0
        if self.kind == "window":
            return max(0, position - self.window + 1)
        return position

    def usable(self, present: Sequence[bool], block_size: int) -> list[bool]:
        """For a path of blocks, which of its prefixes (1 block, 2 blocks, …) this state can resume after.

        `present[i]` says whether the path still holds this state's block (or snapshot) number i.
        """
        if self.kind == "recurrent":
            return list(present)
        accepted, run = [], 0
        for index, held in enumerate(present):
            run = run + 1 if held else 0
            needed = index + 1 - self.first_needed((index + 1) * block_size) // block_size
            accepted.append(run >= needed)
        return accepted

    def blocks_at_most(self, length: int, chunk: int, block_size: int) -> int:
        """The most blocks a sequence of `length` can need at once when it computes `chunk` positions a step."""
        whole = -(-length // block_size)
        if self.kind == "window":
            return min(whole, -(-(self.window + chunk) // block_size) + 1)
        return whole
