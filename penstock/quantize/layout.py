"""Cut parameters into a checkpoint's tensors again: the way back of `penstock/models/load.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.models.load import KEPT_WIDE
from penstock.models.reading import STACKS, Source, Sources, ungroup


def is_kept(parameter: str) -> bool:
    """Return True for a matrix that stays in 16 bits: routers, gates of shared experts, and what latents widen to."""
    return parameter.endswith(KEPT_WIDE)


def cut_rows(sources: Sources, parameter: str) -> Iterator[tuple[Source, slice]]:
    """Yield each tensor that a parameter came from, and its rows of the parameter."""
    first = 0
    for source in sources[parameter]:
        yield source, slice(first, first + source.shape[0])
        first += source.shape[0]


def row_order(source: Source) -> Tensor | None:
    """Return for each row of the checkpoint's tensor its row of the parameter; None if they are the same."""
    if source.layout != "grouped":
        return None
    return torch.argsort(ungroup(torch.arange(source.shape[0]), source.head_size, source.kv_rows))


def restore(value: Tensor, source: Source) -> Tensor:
    """Lay a float tensor out as the checkpoint has it."""
    order = row_order(source)
    if order is not None:
        return value[order]
    if source.layout == "transposed":
        return value.t()
    if source.layout in STACKS:
        return _restore_stack(value, source)
    return value - 1.0 if source.layout == "one_plus" else value


def _restore_stack(value: Tensor, source: Source) -> Tensor:
    stack = value.reshape(source.num_matrices, -1, *value.shape[1:])
    if source.layout.startswith("alternating"):
        stack = stack.reshape(len(stack), 2, -1, *value.shape[1:]).transpose(1, 2).flatten(1, 2)
    return stack.transpose(1, 2) if source.layout.endswith("transposed") else stack
