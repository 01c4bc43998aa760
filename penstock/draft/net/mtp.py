"""MTP: the layer with which a checkpoint predicts the token after next, published beside the model's own layers.

It is one more of the model's layers, on fc(norm(feature), norm(token)); the model's head reads its normed result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from penstock.draft.net.feature import SplitProduct
from penstock.draft.net.feature_spec import LAYER
from penstock.layers import StepInputs
from penstock.models.decoder import Build, Decoder
from penstock.models.files import Checkpoint
from penstock.models.layer import RmsNorm, Shapes, add_prefix, matrix
from penstock.models.load import Options, match, move, read_as, storage
from penstock.models.memory import Memory
from penstock.models.names import IGNORED, Names, Stored
from penstock.models.reading import from_checkpoint
from penstock.models.spec import ModelSpec

PARTS: dict[str, Stored | str] = {  # spellings of MiMo and of DeepSeek
    "input_proj": "fc",
    "token_layernorm": "token_norm",
    "hidden_layernorm": "hidden_norm",
    "final_layernorm": "norm",
    "eh_proj": "fc",
    "enorm": "token_norm",
    "hnorm": "hidden_norm",
    "shared_head.norm": "norm",
    "shared_head.head": IGNORED,  # the model's own, once more
    "embed_tokens": IGNORED,
}


@dataclass(frozen=True)
class LayerNames(Names):
    """Knows one layer of one stack within a whole model's checkpoint."""

    number: int = 0

    def find(self, tensor: str) -> Stored | None:
        found, own = super().find(tensor), f"layers.{self.number}."
        if found is None or not found.name.startswith(own):
            return IGNORED
        return replace(found, name=f"{LAYER}.{found.name.removeprefix(own)}")


@dataclass(frozen=True)
class MtpSpec(ModelSpec):
    """`feature_first`: the order of what fc reads."""

    feature_first: bool = True

    def parameters(self) -> Shapes:
        shapes = matrix("fc", self.width, 2 * self.width)
        for name in ("token_norm", "hidden_norm", "norm"):
            shapes |= add_prefix(name, RmsNorm(self.width, 0.0))
        return add_prefix(LAYER, self.layers[0]) | {f"{LAYER}.{name}": shape for name, shape in shapes.items()}


def read_mtp(target: ModelSpec, tensors: Collection[str], max_model_len: int) -> MtpSpec | None:
    """Find the layer among a model's tensors; None if it has none. It is made like the last of the model's own."""
    in_stack = f"layers.{target.num_layers}."
    if any(f".{in_stack}eh_proj" in f".{name}" for name in tensors):
        stack, number, feature_first = "layers", target.num_layers, False
    elif any(".mtp_layers.0.input_proj" in f".{name}" for name in tensors):
        stack, number, feature_first = "mtp_layers", 0, True
    else:
        return None
    return MtpSpec(
        target.embedding,
        (target.layers[-1],),
        None,
        None,
        LayerNames(target.names.prefixes, stack, {}, {**target.names.layer, **PARTS}, (), number),
        target.max_positions,
        max_model_len,
        architecture="mtp",
        feature_first=feature_first,
    )


class MtpNet:
    shift = 1
    name = "mtp"
    taps: tuple[int, ...] = ()
    is_target = False
    target_ids: np.ndarray | None = None
    own_ids: np.ndarray | None = None

    def __init__(self, checkpoint: Checkpoint, spec: MtpSpec, target: Decoder, options: Options) -> None:
        """Matrices are stored as `options` say, as the target's are."""
        self.spec, self.ops, self._target = spec, target.ops, target
        self.max_model_len = spec.max_model_len
        sources = match(checkpoint, spec)
        take = move(from_checkpoint(checkpoint, sources, options.dtype), options.device)
        hold = storage(target.ops, take, options, read_as(checkpoint, options), sources)
        build = Build(spec, target.ops, take, hold, options.device)
        self._fc = SplitProduct(self.ops, take(f"{LAYER}.fc.weight"), None, 2)
        self._block = build.block(LAYER, spec.layers[0])
        norm = target.spec.norm
        assert norm is not None
        names = ("token_norm", "hidden_norm", "norm")
        self._token_norm, self._hidden_norm, self._norm = (norm.build(build, f"{LAYER}.{name}") for name in names)

    def memories(self) -> list[Memory | None]:
        return self.spec.memories()

    def join(self, features: Sequence[Tensor]) -> Tensor:
        return features[0]

    def forward(self, step: StepInputs, features: Tensor | None, memories: Sequence[Any]) -> Tensor:
        assert features is not None
        pair = [self._hidden_norm(features), self._token_norm(self._target.embedding(step))]
        x = self._fc(pair if self.spec.feature_first else pair[::-1])
        return self._norm(self._block(x, step, memories[0]))

    def logits(self, features: Tensor, at: Tensor | None) -> Tensor:
        return self._target.head(features if at is None else self.ops.gather(at, features))
