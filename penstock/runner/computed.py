"""What a forward pass leaves, as the sampler reads it."""

from __future__ import annotations

import numpy as np
import torch

Array = np.ndarray


class Computed:
    """`hidden` [T, C], and if any were wanted `logits` [M, V] float32. A replayed step fills the same one again."""

    def __init__(
        self, hidden: torch.Tensor, logits: torch.Tensor | None = None, likeliest: torch.Tensor | None = None
    ) -> None:
        self.hidden = hidden
        self.logits = logits
        self._likeliest = likeliest
        self._values: Array | None = None  # of `logits`, where they lie; made after the recording

    @property
    def values(self) -> Array:
        """[M, V]."""
        if self._values is None:
            assert self.logits is not None
            self._values = self.logits.numpy()
        return self._values

    @property
    def likeliest(self) -> list[int]:
        """The first of the largest logits of each row."""
        assert self._likeliest is not None
        return self._likeliest.tolist()
