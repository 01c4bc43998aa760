"""Where in a model an adapter's module is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.files.json_file import quote_name
from penstock.models.names import IGNORED
from penstock.models.spec import ModelSpec

EMBEDDING = "embedding.tokens"
NO_LINEARS = re.compile(r"embedding\.(positions|types)|head\.project|.*\.kv_b")  # tables, and what latents absorb
MIXTURE = re.compile(r"\.mlp\.(experts|router|selection|shared|shared_gate)\.")


@dataclass(frozen=True)
class LoraPlace:
    """A module's place in the model: a linear, the rows of it, and how they are ordered."""

    linear: str
    first: int
    num_out: int
    num_in: int
    group: tuple[int, int] | None = None  # head size and key rows, where the checkpoint groups rows by key head


Find = Callable[[str], LoraPlace | None]  # the place of a module


class ModelPlaces:
    """Finds the linear that a module of the base model is, or is a part of."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.shapes, self.merges = spec, spec.parameters(), spec.merges()

    def find(self, module: str) -> LoraPlace | None:
        spec, shapes = self.spec, self.shapes
        stored = spec.names.find(f"{module}.weight")
        if stored is None or stored is IGNORED or MIXTURE.search(stored.name):
            return None
        name = stored.name.removesuffix(".weight")
        if name == "head.rows" and spec.head is not None:
            return LoraPlace(name, 0, spec.head.vocab_size, spec.head.row)
        if stored.name in shapes:
            shape = shapes[stored.name]
            if len(shape) != 2 or NO_LINEARS.fullmatch(name):
                return None
            if name == EMBEDDING:
                return LoraPlace(name, 0, shape[1], shape[0])
            merge = self.merges.get(name)
            group = (merge.head_size, merge.parts[1][1]) if merge and stored.layout == "grouped" else None
            return LoraPlace(name, 0, *shape, group)
        return self._find_part(name)

    def _find_part(self, name: str) -> LoraPlace | None:
        above, _, last = name.rpartition(".")
        for linear in (f"{above}.{merged}" for merged in self._merged_linears):
            merge = self.merges.get(linear)
            if merge is not None and last in dict(merge.parts):
                before = [part for part, _ in merge.parts].index(last)
                first = sum(rows for _, rows in merge.parts[:before])
                return LoraPlace(linear, first, dict(merge.parts)[last], self.shapes[f"{linear}.weight"][1])
        return None

    @cached_property
    def _merged_linears(self) -> tuple[str, ...]:
        """The last parts of the names of merged linears, such as `qkv`."""
        return tuple(dict.fromkeys(linear.rpartition(".")[2] for linear in self.merges))


def require_finite(path: Path, tensor: Tensor, name: str) -> Tensor:
    """Return a tensor that is float32 or less; refuse one of a damaged file."""
    tensor = tensor.float() if tensor.dtype is torch.float64 else tensor
    if not tensor.isfinite().all():
        raise InvalidModel(f"{path}: tensor {quote_name(name)} contains NaN or infinity: the adapter is damaged")
    return tensor
