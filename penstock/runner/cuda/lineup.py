"""The rows of steps of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from penstock.engine.plan import RowResult
from penstock.ops.sample import BAD
from penstock.runner.cuda.shared import Group
from penstock.runner.rows import DeviceRow
from penstock.sampling.likeliest import DAMAGED

Value = TypeVar("Value")


class Lineup:
    """A plan's rows in the order of their step, the longest first: what is computed last runs beside little else, and
    should not take long. While the same rows go on by one token each, nothing of it changes but their positions."""

    def __init__(
        self, numbers: np.ndarray, devices: Sequence[DeviceRow], starts: np.ndarray, num_rows: int, num_admitted: int
    ) -> None:
        """From the plan's rows in its order; no row has been given to another sequence while `num_admitted` is the
        same."""
        order = np.argsort(-starts, kind="stable")
        self.numbers, self.starts, self._num_admitted = numbers[order], starts[order], num_admitted
        self.devices = [devices[index] for index in order.tolist()]
        self.simple = all(device.state.simple for device in devices)
        self.groups: list[Group] = []
        self._texts = [device.state.tokens for device in self.devices]
        self._places = np.full(num_rows, -1)  # of each row in the step
        self._places[self.numbers] = np.arange(len(order))

    def goes_on(self, numbers: np.ndarray, starts: np.ndarray, num_admitted: int) -> bool:
        """Whether a plan has the same rows, each at its next position; they are taken to be there from now on."""
        places = self._places[numbers]
        if num_admitted != self._num_admitted or len(places) != len(self.numbers) or places.min() < 0:
            return False
        ordered = np.empty_like(starts)
        ordered[places] = starts
        if (ordered - self.starts != 1).any():
            return False
        self.starts = ordered
        return True

    def places(self, numbers: np.ndarray) -> list[int]:
        """Where a plan's rows are in the step."""
        found: list[int] = self._places[numbers].tolist()
        return found

    def tokens(self) -> list[int]:
        """Those at the rows' positions, -1 for one that only the device knows yet."""
        return [text[start] if start < len(text) else -1 for start, text in zip(self.starts.tolist(), self._texts)]

    def take(self, tokens: Sequence[int], places: Sequence[int]) -> list[RowResult | int]:
        """The tokens that came of a step of simple rows, in its order; the results are for rows at these places."""
        results: list[RowResult | int] = [tokens[place] for place in places]
        if BAD in tokens:
            results = [RowResult(error=DAMAGED) if token == BAD else token for token in results]
        for text, token in zip(self._texts, tokens):
            if token != BAD:
                text.append(token)
        return results


def ordered(values: Sequence[Value], places: Sequence[int]) -> list[Value]:
    """Each value at its place."""
    return [value for _, value in sorted(zip(places, values), key=lambda pair: pair[0])]
