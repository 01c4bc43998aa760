"""A step on the device: the tensors a model's forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from penstock.layers import Ends
from penstock.ops import Tail, Work


@dataclass
class Step:
    """T tokens of S sequences, packed one after the other; one block table per cache group, and slots of paged groups.

    Slots and lengths follow from `places`, rotary embeddings and ALiBi from `positions`: the same tensor by default."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: list[Any]  # per group [T] int64: block * P + offset where this token's state goes; None: recurrent
    tables: list[torch.Tensor]  # per group [S, B] int32: place // P -> block, -1 before a window; recurrent: the state
    query_start: torch.Tensor  # [S + 1] int32
    lengths: torch.Tensor  # [S] int32: places up to and including this step's
    work: Work | None = None  # how attention is split, where a device needs it
    places: torch.Tensor = None  # type: ignore[assignment]  # [T] int64
    tail: Tail | None = None  # paths of draft tokens that form trees
    adapters: Any = None  # [T] int32: the slot of each token's adapters, -1 for none; on a GPU `ops.AdapterRows`
    ends: Ends | None = None  # tokens that logits are wanted of, where all others may stop early

    def __post_init__(self) -> None:
        if self.places is None:
            self.places = self.positions

    def cut(self, num_tokens: int, num_sequences: int) -> Step:
        """Take the first tokens and sequences without copying."""
        return Step(
            self.ids[:num_tokens],
            self.positions[:num_tokens],
            [slots if slots is None else slots[:num_tokens] for slots in self.slots],
            [table[:num_sequences] for table in self.tables],
            self.query_start[: num_sequences + 1],
            self.lengths[:num_sequences],
            places=self.places[:num_tokens],
            tail=None if self.tail is None else self.tail.cut(num_tokens, num_sequences),
            adapters=None if self.adapters is None else self.adapters[:num_tokens],
        )


def ends_of(
    step: Step, at: torch.Tensor, owners: torch.Tensor, num_kv_splits: int = 1, lengths: torch.Tensor | None = None
) -> Ends:
    """Make a step of the tokens at[M], each the last query of its sequence owners[M]; padding has length 0."""
    count, tail = len(at), step.tail
    places = step.places[at]
    alone = Step(
        step.ids[at],
        step.positions[at] if step.places is not step.positions else places,
        [slots if slots is None else slots[at] for slots in step.slots],
        [table[owners] for table in step.tables],
        torch.arange(count + 1, dtype=torch.int32, device=at.device),
        (places + 1).int() if lengths is None else lengths,
        None if step.work is None else Work(count, None, num_kv_splits),
        places,
        None if tail is None else Tail(tail.begins[owners], tail.positions[at], tail.nodes[at]),
        None if step.adapters is None else step.adapters[at],
    )
    return Ends(at, alone)
