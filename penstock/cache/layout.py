"""How many bytes a key or value takes in each way of storing them."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 4  # of what a head's numbers and scale take: scales are float32


@dataclass(frozen=True)
class KvLayout:
    """`itemsize` bytes per number, and a scale for each position and head where the numbers are codes."""

    itemsize: int
    scale_bytes: int = 0

    def numbers_bytes(self, head_size: int) -> int:
        """Of one position of one head, without its scale."""
        return -(-head_size * self.itemsize // ALIGNMENT) * ALIGNMENT

    def position_bytes(self, num_heads: int, head_size: int) -> int:
        """Of one position's keys and values, scales included."""
        return 2 * num_heads * (self.numbers_bytes(head_size) + self.scale_bytes)


LAYOUTS = {
    "float32": KvLayout(4),
    "bfloat16": KvLayout(2),
    "float16": KvLayout(2),
    "int8": KvLayout(1, scale_bytes=4),
    "fp8": KvLayout(1),
}
