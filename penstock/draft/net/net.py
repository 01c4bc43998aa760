"""Drafting models as the runner sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from penstock.layers import StepInputs
from penstock.models.memory import Memory


class DraftNet(Protocol):
    """Drafts one token after the other. Position p reads the token at p + `shift`; with a shift of 1 also features of
    the target at p, and from the first draft token on its own."""

    name: str
    shift: int
    max_model_len: int  # positions it can compute
    taps: tuple[int, ...]  # the target's layers whose inputs are features; none: features are its hidden states
    is_target: bool  # its memory is the target's own
    target_ids: np.ndarray | None  # [V] the target's id of each of its own; None: they are the same
    own_ids: np.ndarray | None  # the other way round; None: they are the same

    def memories(self) -> list[Memory | None]:
        """List what each of its layers keeps."""

    def join(self, features: Sequence[Tensor]) -> Tensor:
        """Make features [T, C] out of the target's."""

    def forward(self, step: StepInputs, features: Tensor | None, memories: Sequence[Any]) -> Tensor:
        """Compute the step's tokens → features [T, C], writing memories."""

    def logits(self, features: Tensor, at: Tensor | None) -> Tensor:
        """Rows at[M] of features [T, C], or all → [M, V] float32."""


class DraftHeads(Protocol):
    """Draft several tokens at once: head i reads the target's hidden state at p and proposes the token at p + 2 + i."""

    name: str
    target_ids: np.ndarray | None
    num_heads: int

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """hidden [S, C] → [S, V] float32."""
