"""Seeded inputs, and the table that says which examples an op has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.ops import AdapterRows, LoraStacks, Op
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.registry import Example
from tests.ops.examples.rows import EachRow, Rows

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """The calls that an op is tested with, and what a row of them is."""

    calls: Callable[[], Iterable[Example]]
    rows: Rows


def examples(
    op: Op[..., Any], rows: Rows | None = None
) -> Callable[[Callable[[], Iterable[Example]]], Callable[[], Iterable[Example]]]:
    """Enter the decorated generator as the examples of `op`; a row is dimension 0 of the first argument by default."""

    def enter(calls: Callable[[], Iterable[Example]]) -> Callable[[], Iterable[Example]]:
        assert op.name not in CASES, f"op {op.name} has examples already"
        CASES[op.name] = Case(calls, rows or EachRow(op.reference.__code__.co_varnames[0]))
        return calls

    return enter


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def integers(seed: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Uniform in [0, high)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, dtype=dtype)


def permutation(seed: int, size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def with_epilogue(call: Example) -> Example:
    """Return a call whose bias, activation, gated and residual are one epilogue."""
    parts = {name: call[name] for name in Epilogue._fields if name in call}
    return {name: call[name] for name in call if name not in parts} | {"epilogue": Epilogue(**parts)}


def _move_view(tensor: Tensor, device: str) -> Tensor:
    """Return a view of the same part of what it is a view of, moved: slots stay as far apart."""
    whole = tensor if tensor._base is None else tensor._base
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def move(value: Any, device: str) -> Any:
    """Return a tensor on `device`, a group of values with its tensors there, anything else as it is."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(part, device) for part in value))
    if isinstance(value, AdapterRows):
        return AdapterRows(value.slots.to(device))
    if isinstance(value, LoraStacks):
        moved = copy.copy(value)
        moved.a, moved.b, moved.scales = (_move_view(each, device) for each in (value.a, value.b, value.scales))
        return moved
    return value.to(device) if isinstance(value, Tensor) else value


def tensors_of(example: Example) -> list[Tensor]:
    """Return the tensors of a call, those of its epilogue too."""
    flat = [part for value in example.values() for part in (value if isinstance(value, Epilogue) else [value])]
    return [value for value in flat if isinstance(value, Tensor)]
