"""Changes that merging makes to a tensor of a base, and the base's tensors by the names that adapters have for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.files.json_file import quote_name
from penstock.models.files.safetensors import SafetensorsCheckpoint
from penstock.models.lora.places import EMBEDDING, LoraPlace
from penstock.models.names import IGNORED, Stored
from penstock.models.spec import ModelSpec

HEAD = "head.rows.weight"


class WeightDelta(Protocol):
    """Computes what is added to a weight as it is stored, in float32."""

    def __call__(self, weight: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LowRankTerm:
    """scale · b · a, for a [r, in] and b [out, r]."""

    a: Tensor
    b: Tensor
    scale: float
    is_transposed: bool  # the weight is [in, out]

    def __call__(self, weight: Tensor) -> Tensor:
        delta = self.scale * (self.b @ self.a)
        return delta.t() if self.is_transposed else delta


@dataclass(frozen=True)
class DoraTerm:
    """Each output of weight + term gets the length that was trained."""

    term: LowRankTerm
    magnitude: Tensor  # [out]

    def __call__(self, weight: Tensor) -> Tensor:
        moved = weight + self.term(weight)
        axis = 0 if self.term.is_transposed else 1
        lengths: Tensor = torch.linalg.vector_norm(moved, dim=axis)
        factor = (self.magnitude / lengths).unsqueeze(axis)
        return moved * factor - weight


@dataclass(frozen=True)
class WholeTensor:
    tensor: Tensor

    def __call__(self, weight: Tensor) -> Tensor:
        return self.tensor.float() - weight


@dataclass(frozen=True)
class TokenRows:
    """Trained rows [N, C] of an embedding."""

    rows: Tensor
    values: Tensor

    def __call__(self, weight: Tensor) -> Tensor:
        delta = torch.zeros_like(weight)
        delta[self.rows] = self.values.float() - weight[self.rows]
        return delta


@dataclass(frozen=True)
class WeightChange:
    delta: WeightDelta
    scale: float


def apply_changes(weight: Tensor, changes: Sequence[WeightChange]) -> Tensor:
    """Add all changes of a weight, each made from the weight as it was. A whole tensor alone replaces it."""
    if len(changes) == 1 and changes[0].scale == 1 and isinstance(changes[0].delta, WholeTensor):
        return changes[0].delta.tensor.float()
    merged = weight.clone()
    for change in changes:
        merged.add_(change.delta(weight), alpha=change.scale)
    return merged


class StoredTensors:
    """A checkpoint's tensors, by their own names and by those that other versions of its model have for them."""

    def __init__(self, base: SafetensorsCheckpoint, spec: ModelSpec) -> None:
        self.base, self.spec = base, spec
        found = {name: self._find_parameter(name) for name in base.names()}
        self._names = {one.name: name for name, one in found.items() if one is not None and "*" not in one.name}
        self._head = spec.names.spelling(HEAD)

    def _find_parameter(self, name: str) -> Stored | None:
        found = self.spec.names.find(name)
        return found if isinstance(found, Stored) and found is not IGNORED else None

    def find_stored(self, parameter: str) -> str | None:
        """Return the name in the file of one of our parameters."""
        return self._names.get(parameter)

    def find(self, name: str) -> str | None:
        """Return the name in the file; a head that is tied has one of its own."""
        if name in self.base.entries:
            return name
        stored = self._find_parameter(name)
        if stored is None:
            return None
        return self._names.get(stored.name, self._head if stored.name == HEAD else None)

    def require(self, name: str, folder: Path) -> str:
        found = self.find(name)
        if found is None:
            raise InvalidModel(
                f"{self.base.path} stores no tensor of its own for {quote_name(name)}, which {folder} changes: "
                "it stores the projection merged, or is of another model"
            )
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.base.entries:  # a tied head
            name = self._names[f"{EMBEDDING}.weight"]
        return tuple(self.base.entries[name][1].shape)

    def is_transposed(self, name: str) -> bool:
        """True if a matrix is stored [in, out]."""
        stored = self._find_parameter(name)
        return stored is not None and (stored.layout == "transposed" or stored.name == f"{EMBEDDING}.weight")

    def place(self, module: str) -> LoraPlace | None:
        """Find a module that has a matrix."""
        name = self.find(f"{module}.weight")
        shape = self.shape(name) if name is not None else ()
        if name is None or len(shape) != 2:
            return None
        num_out, num_in = shape[::-1] if self.is_transposed(name) else shape
        return LoraPlace(name, 0, num_out, num_in)

    def check(self, name: str, made: WholeTensor | TokenRows, path: Path) -> None:
        """Require that a change fits its tensor."""
        shape = self.shape(name)
        if isinstance(made, WholeTensor):
            given, wanted = tuple(made.tensor.shape), shape
        else:
            given, wanted = tuple(made.values.shape), (len(made.rows), *shape[1:])
            if len(made.rows) and int(made.rows.max()) >= shape[0]:
                raise InvalidModel(
                    f"{path}: token {int(made.rows.max())} of trainable_token_indices is beyond the {shape[0]} tokens "
                    "of the model: the adapter is of another model"
                )
        if given != wanted:
            raise InvalidModel(
                f"{path}: what is for {quote_name(name)} has shape {list(given)}, and this model takes {list(wanted)}: "
                "the adapter is of another model"
            )

    def add_magnitude(self, name: str, term: LowRankTerm, magnitude: Tensor | None, path: Path) -> WeightDelta:
        """Make a DoRA term of a low-rank one; without a magnitude it stays as it is."""
        if magnitude is None:
            return term
        stored = self._find_parameter(name)
        if stored is not None and stored.name == f"{EMBEDDING}.weight":
            raise InvalidModel(
                f"{path}: DoRA of an embedding is not supported: merge the adapter into the model with peft"
            )
        if magnitude.shape != (term.b.shape[0],):
            raise InvalidModel(
                f"{path}: a magnitude of {quote_name(name)} has shape {list(magnitude.shape)}, and this model takes "
                f"{[term.b.shape[0]]}: the adapter is of another model"
            )
        return DoraTerm(term, magnitude)
