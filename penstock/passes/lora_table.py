"""Rooms for the adapters of a model's linears, by the linears' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.models.lora import Adapter, is_whole
from penstock.models.spec import ModelSpec
from penstock.ops import LoraStacks, LoraWeights, Term
from penstock.ops.matmul.lora_stacks import LoraArea, LoraImage
from penstock.quant.scheme import Scheme

RANK_STEP = 16  # inputs of a tensor-core instruction
EMBEDDING, PROJECT, HEAD = "embedding.tokens", "embedding.project", "head.rows"


class LoraTable(Mapping[str, LoraWeights]):
    """The low-rank matrices of every linear that may have some, by the linear's name; rooms for `num_slots`."""

    is_on_gpu = False
    sum_rank: int | None = None  # that the ranks of a request's adapters may add up to

    def __init__(self, spec: ModelSpec, num_slots: int) -> None:
        self.spec, self.num_slots = spec, num_slots
        # The model's own weights, for adapters that replace some; None where low-rank matrices of linears are all.
        self.bases: dict[str, Scheme] | None = {} if self.is_whole and not self.is_on_gpu else None
        self._merges = spec.merges()
        self._made: dict[str, LoraWeights] = {}

    @property
    def is_whole(self) -> bool:
        """True if one process has the whole model."""
        return is_whole(self.spec)

    def make(self, name: str, num_out: int, num_in: int, base: Scheme | None = None, num_matrices: int = 1) -> Any:
        """Make the rooms of a linear, or of `num_matrices` of a stack. `base` is its weight."""
        merge = self._merges.get(name)
        parts = len(merge.parts) // num_matrices if merge else 1
        if self.bases is not None and base is not None:
            self.bases[name] = base
        return self._made.setdefault(name, LoraWeights(num_out, self.num_slots, parts, num_matrices))

    def allocate(self) -> None:
        """Take memory for the slots, once all rooms are made."""

    def fill(self, slot: int, adapters: Sequence[tuple[Any, float]]) -> None:
        """Put adapters, each times a factor, into a slot; none empties it."""
        for name, weights in self.items():
            terms = [Term(adapter.list_parts(name), scale) for adapter, scale in adapters]
            weights.fill(slot, terms if any(parts for parts, _ in terms) else ())

    def __getitem__(self, name: str) -> LoraWeights:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class StackTable(LoraTable):
    """A LoraTable on a GPU: each slot has room for adapters whose ranks add up to `rank`, which never moves."""

    is_on_gpu = True

    def __init__(self, spec: ModelSpec, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, num_slots)
        self.rank, self.dtype, self.device = -(-rank // RANK_STEP) * RANK_STEP, dtype, device
        self.sum_rank = self.rank

    def make(self, name: str, num_out: int, num_in: int, base: Scheme | None = None, num_matrices: int = 1) -> Any:
        merge = self._merges.get(name)
        sizes = [rows for _, rows in merge.parts] if merge else [num_out]
        if name not in self._made:
            made: Any = LoraStacks(self.rank, (num_out, num_in), sizes, name == EMBEDDING)
            self._made[name] = made
        return self._made[name]

    def allocate(self) -> None:
        stacks: Any = self._made
        self.area = LoraArea(stacks, self.num_slots, self.dtype, self.device)

    def arrange(self, adapter: Adapter) -> LoraImage:
        """Lay an adapter's matrices out for the device."""
        return self.area.lay_out(adapter.parts, adapter.rank)

    def fill(self, slot: int, adapters: Sequence[tuple[Any, float]]) -> None:
        self.area.fill(slot, adapters)


def make_lora_table(
    spec: ModelSpec, num_slots: int, rank: int, dtype: torch.dtype | None, device: torch.device
) -> LoraTable:
    """Make the table of a device."""
    if device.type == "cpu":
        return LoraTable(spec, num_slots)
    return StackTable(spec, num_slots, rank, dtype or torch.bfloat16, device)
