"""The rows of steps of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from penstock.engine.plan import Row, RowResult
from penstock.ops.sample import BAD
from penstock.runner.cuda.shared import Group
from penstock.runner.rows import DeviceRow
from penstock.sampling.likeliest import DAMAGED

Value = TypeVar("Value")


class Lineup:
    """A plan's rows in the order of their step, the longest first: what is computed last runs beside little else, and
    should not take long. While the same rows go on by one token each, nothing of it changes but their positions."""

    def __init__(self, rows: Sequence[Row], devices: list[DeviceRow], starts: np.ndarray) -> None:
        self._known, self._starts = devices, starts
        self.order = np.argsort(-starts, kind="stable")            # the plan's rows in the step
        self.places = np.argsort(self.order).tolist()              # where each of them is there
        self.devices = self.ordered(devices)
        self.numbers = np.array([row.row for row in self.ordered(rows)], dtype=np.int32)
        self.simple = all(device.state.simple for device in devices)
        self.groups: list[Group] = []
        self._texts = [device.state.tokens for device in self.devices]

    def goes_on(self, devices: list[DeviceRow], starts: np.ndarray) -> bool:
        """Whether a plan has the same rows, each at its next position; they are taken to be there from now on."""
        if devices != self._known or (starts - self._starts != 1).any():
            return False
        self._starts = starts
        return True

    def ordered(self, values: Sequence[Value]) -> list[Value]:
        """What there is for each of the plan's rows, as they are in the step."""
        return [values[index] for index in self.order.tolist()]

    def tokens(self) -> list[int]:
        """Those at the rows' positions, -1 for one that only the device knows yet."""
        starts = self._starts[self.order].tolist()
        return [text[start] if start < len(text) else -1 for start, text in zip(starts, self._texts)]

    def take(self, tokens: Sequence[int]) -> list[RowResult | int]:
        """The tokens that came of a step of simple rows, in its order; the results are in the plan's."""
        results: list[RowResult | int] = [tokens[place] for place in self.places]
        if BAD in tokens:
            results = [RowResult(error=DAMAGED) if token == BAD else token for token in results]
        for text, token in zip(self._texts, tokens):
            if token != BAD:
                text.append(token)
        return results
