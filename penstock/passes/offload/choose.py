"""Which weights leave the device: evenly over the layers, so that copies of some run beside the others' arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


class OffloadQuota:
    """Deals `wanted` bytes out to layers, in their order: after each of them as large a share has been chosen as of all
    layers' values, and so never too little as long as there is enough to choose from."""

    def __init__(self, wanted: int, values: Sequence[int]) -> None:
        total = max(1, sum(values))
        self._due = [wanted * so_far // total for so_far in accumulate(values)]
        self.chosen = 0  # bytes

    def take(self, tiers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Choose among the next layer's weights, given their bytes; those of the first tier go first. Returns the tier
        and the place of each. The smallest weight that is enough is taken, else the largest and more."""
        due, picked = self._due.pop(0), []
        for number, sizes in enumerate(tiers):
            left = sorted(range(len(sizes)), key=lambda place: sizes[place])
            while left and self.chosen < due:
                enough = [place for place in left if self.chosen + sizes[place] >= due]
                place = enough[0] if enough else left[-1]
                left.remove(place)
                picked.append((number, place))
                self.chosen += sizes[place]
        return picked
