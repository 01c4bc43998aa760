"""Cut parameters into a checkpoint's tensors again: the way back of `penstock/models/load.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.reading import Source, Sources, ungroup


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
    return value - 1.0 if source.layout == "one_plus" else value


def require_separate(sources: Sources) -> None:
    """Refuse tensors that hold several parameters, such as stacks of experts."""
    for parts in sources.values():
        for source in parts:
            if source.rows is not None or source.layout == "stacked":
                raise InvalidModel(
                    f"tensor {source.tensor!r} holds several matrices: such models are not quantized yet"
                )
