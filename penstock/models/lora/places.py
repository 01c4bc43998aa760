"""Where in a model an adapter's module is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.files.json_file import quote_name
from penstock.models.names import IGNORED
from penstock.models.spec import ModelSpec

EMBEDDING = "embedding.tokens"
NO_LINEARS = re.compile(r"embedding\.(positions|types)|head\.project|.*\.kv_b")  # tables, and what latents absorb
HEAD = "head.rows"
EXPERTS = re.compile(r"\.mlp\.(experts|selection)\.")
BESIDE_EXPERTS = re.compile(r"\.mlp\.(router|shared|shared_gate)\.")  # linears that every token goes through
TABLES = re.compile(r"embedding\.(positions|types)|head\.project|.*\.(selection|experts\.[^.]+)")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)")
STACKS = ("gate_up_proj", "down_proj")  # parameters of modules of stacked experts


@dataclass(frozen=True)
class LoraPlace:
    """A module's place in the model: a linear, the rows of it, and how they are ordered."""

    linear: str
    first: int
    num_out: int
    num_in: int
    group: tuple[int, int] | None = None  # head size and key rows, where the checkpoint groups rows by key head
    per_matrix: int = 0  # rows of a matrix of a stack
    matrix: int = 0  # of a stack of matrices, whose rows are counted from its own first
    stack: int = 1  # matrices of the stack, where the module is all of them
    alternates: bool = False  # a stack whose gates and ups are rows in turn
    heads: tuple[int, int] | None = None  # key and value rows of each head, of what latent attention absorbs
    parameter: str = ""  # that the config knows a stack by

    @property
    def rows(self) -> range:
        """The outputs, those of a whole stack counted through."""
        first = self.matrix * self.per_matrix + self.first
        return range(first, first + self.stack * self.num_out)


NESTED = re.compile(r"(\.base_layer)+$")
Find = Callable[[str], LoraPlace | None]  # the place of a module


class ModelPlaces:
    """Finds the linear that a module of the base model is, or is a part of."""

    def __init__(self, spec: ModelSpec, with_stacks: bool = False, with_mixtures: bool = False) -> None:
        """`with_stacks`: those of experts and of latent attention, too; `with_mixtures`: those beside experts."""
        self.spec, self.shapes, self.merges = spec, spec.parameters(), spec.merges()
        self.with_stacks, self.with_mixtures = with_stacks, with_stacks or with_mixtures

    def find(self, module: str) -> LoraPlace | None:
        spec, shapes = self.spec, self.shapes
        stored = spec.names.find(f"{module}.weight")
        if stored is None or stored is IGNORED or not self._may_have(stored.name):
            return None
        name = stored.name.removesuffix(".weight")
        if name == HEAD and spec.head is not None:
            return LoraPlace(name, 0, spec.head.vocab_size, spec.head.row)
        if stored.name in shapes:
            shape = shapes[stored.name]
            if len(shape) != 2 or (TABLES if self.with_stacks else NO_LINEARS).fullmatch(name):
                return None
            if name.endswith(".kv_b"):
                return LoraPlace(name, 0, *shape, heads=self._find_heads(name))
            if name == EMBEDDING:
                return LoraPlace(name, 0, shape[1], shape[0])
            merge = self.merges.get(name)
            group = (merge.head_size, merge.parts[1][1]) if merge and stored.layout == "grouped" else None
            return LoraPlace(name, 0, *shape, group)
        return self._find_expert(name) or self._find_part(name)

    def _may_have(self, name: str) -> bool:
        is_beside = BESIDE_EXPERTS.search(name) is not None
        return (self.with_mixtures or not is_beside) and (self.with_stacks or EXPERTS.search(name) is None)

    def _find_heads(self, name: str) -> tuple[int, int]:
        mixer: Any = self.spec.layers[int(name.split(".")[1])].mixer
        return mixer.nope_size, mixer.value_size

    def _find_expert(self, name: str) -> LoraPlace | None:
        found = EXPERT.fullmatch(name)
        if found is None:
            return None
        linear = f"{found[1]}.{'down' if found[3] == 'down' else 'gate_up'}"
        merge = self.merges.get(linear)
        if merge is None or int(found[2]) >= merge.num_matrices:
            return None
        rows, num_in = self.shapes[f"{linear}.weight"]
        num_out = dict(merge.parts)[f"{found[2]}.{found[3]}"]
        per_matrix = rows // merge.num_matrices
        first = num_out if found[3] == "up" else 0
        return LoraPlace(linear, first, num_out, num_in, matrix=int(found[2]), per_matrix=per_matrix)

    def find_stacks(self, module: str) -> Iterator[LoraPlace]:
        """Find the stacks that a module of experts has as parameters; PEFT names one of them after each other."""
        module = NESTED.sub("", module)
        for last in STACKS if self.with_stacks else ():
            stored = self.spec.names.find(f"{module}.{last}")
            merge = None if stored is None else self.merges.get(stored.name.removesuffix(".weight"))
            if stored is not None and merge is not None and merge.num_matrices > 1:
                rows, num_in = self.shapes[stored.name]
                linear, num_out = stored.name.removesuffix(".weight"), rows // merge.num_matrices
                alternates = stored.layout in ("alternating", "alternating_transposed")
                yield LoraPlace(
                    linear, 0, num_out, num_in, stack=merge.num_matrices, alternates=alternates,
                    parameter=f"{module}.{last}", per_matrix=num_out,
                )  # fmt: skip

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
