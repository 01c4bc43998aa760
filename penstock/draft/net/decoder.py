"""A whole model that drafts: another checkpoint, or the target without some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from penstock.layers import StepInputs
from penstock.models.decoder import Decoder
from penstock.models.memory import Memory


class DecoderNet:
    shift = 0
    taps: tuple[int, ...] = ()

    def __init__(self, model: Decoder, name: str = "draft_model", layers: Sequence[int] | None = None) -> None:
        """With `layers`, these of the target's, and its own memory of them."""
        self.model, self.name, self.is_target = model, name, layers is not None
        self.layers = range(model.spec.num_layers) if layers is None else tuple(layers)
        self.max_model_len = model.spec.max_model_len
        self.target_ids: np.ndarray | None = None
        self.own_ids: np.ndarray | None = None
        self._part = Decoder(
            model.spec, model.ops, model.embedding, [model.blocks[i] for i in self.layers], model.norm, model.head
        )

    def memories(self) -> list[Memory | None]:
        return [] if self.is_target else self.model.spec.memories()

    def join(self, features: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError("it reads tokens alone")

    def forward(self, step: StepInputs, features: Tensor | None, memories: Sequence[Any]) -> Tensor:
        return self._part.forward(step, [memories[i] for i in self.layers])

    def logits(self, features: Tensor, at: Tensor | None) -> Tensor:
        return self._part.logits(features, at)
