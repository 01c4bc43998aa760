"""The target's hidden states that a drafting model reads, kept from a step until its result is read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.engine.plan import Plan, RowResult
from penstock.models.decoder import Decoder
from penstock.runner.rows import RunningRow
from penstock.runner.step import Step


class Features:
    """Buffers that every step fills at the same addresses, recorded or not."""

    def __init__(
        self, layers: Sequence[int], of_outputs: bool, num_rows: int, width: int, dtype: torch.dtype, device: Any
    ) -> None:
        """Inputs of these layers, or without any the last hidden states: of all tokens, or `of_outputs` alone."""
        self.layers, self.of_outputs = tuple(layers), of_outputs
        self._buffers = [torch.zeros(num_rows, width, dtype=dtype, device=device) for _ in self.layers or (0,)]

    def compute(self, model: Decoder, step: Step, caches: Sequence[Any]) -> torch.Tensor:
        """Compute a step → hidden states of its tokens, or of `step.ends` alone."""
        ends = step.ends
        if not self.layers and not self.of_outputs:
            step.ends = None
        taps = {layer: step.ids for layer in self.layers}
        hidden = model.forward(step, caches, taps)
        for buffer, values in zip(self._buffers, [taps[layer] for layer in self.layers] or [hidden]):
            buffer[: len(values)].copy_(values)
        return hidden if step.ends is ends or ends is None else model.ops.gather(ends.at, hidden)

    def take(self, count: int) -> list[torch.Tensor]:
        """Copy the first rows of each: the next step may begin before they are read."""
        return [buffer[:count].clone() for buffer in self._buffers]


class DeviceDrafter(Protocol):
    """Drafts after a step on a GPU."""

    features: Features | None

    def follow(self, plan: Plan, rows: Sequence[RunningRow]) -> None:
        """Take note of the rows' new blocks, before anything is written to them."""

    def draft(self, plan: Plan, rows: Sequence[RunningRow], computed: Any, results: Sequence[RowResult]) -> None:
        """Add draft tokens to the results."""

    def prepare(self) -> bool:
        """Capture a step that may come later; False if nothing is left."""

    def warm(self) -> None:
        """Compile the first kernels."""

    def forget(self) -> None:
        """Drop all captured graphs."""


@dataclass
class KeptStep:
    """A started step for whose rows a model may draft once its tokens have come."""

    drafter: DeviceDrafter
    plan: Plan
    rows: Sequence[RunningRow]
    firsts: Sequence[int]  # where each row's features begin
    features: Sequence[torch.Tensor]
    number: int  # of plans until this one

    def add(self, results: Sequence[RowResult | int]) -> tuple[Sequence[RowResult | int], float]:
        """Return the results with drafts, and the seconds that this took."""
        begun = time.perf_counter()
        whole = [RowResult((result,)) if isinstance(result, int) else result for result in results]
        with torch.inference_mode():
            self.drafter.draft(self.plan, self.rows, self, whole)
        found = [one if one.draft else result for one, result in zip(whole, results)]
        return found, time.perf_counter() - begun
