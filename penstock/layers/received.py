"""A pipeline stage's first layer: hidden states that another rank computed."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.layers.step import StepInputs

NUM_SMALL = 64  # tokens of a step: no fewer than those of the largest that is taped


class Received:
    """Called like an embedding. Small steps read hidden states from one place, so that they can be taped."""

    def __init__(self, width: int) -> None:
        self._small = torch.empty(NUM_SMALL, width)
        self._large = self._small

    def take(self, hidden: Tensor) -> None:
        """Take the hidden states [T, C] of the next step."""
        if len(hidden) <= len(self._small):
            self._small[: len(hidden)] = hidden
        else:
            self._large = hidden

    def __call__(self, step: StepInputs) -> Tensor:
        count = len(step.ids)
        return self._small[:count] if count <= len(self._small) else self._large
