"""What is asked of every body; each check raises AssertionError."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.ops import Op
from penstock.ops.registry import Example
from penstock.ops.rows import EachSlot


@cache
def examples_of(op: Op[..., Any]) -> tuple[Example, ...]:
    assert op.examples is not None
    return tuple(op.examples())


def example_of(op: Op[..., Any], index: int) -> Example:
    """A fresh copy, views of one storage still sharing one: ops may write into their arguments."""
    return copy.deepcopy(examples_of(op)[index])


def exact_reference(op: Op[..., Any], example: Example) -> Any:
    """What an exact body is near. Of 8-bit floats it rounds a row alone, too, as the reference does in company."""
    if not op.name.startswith("fp8") or op.rows.count(example) != 1:
        return op.reference(**example)
    twice = op.rows.take(example, [0, 0])
    return op.rows.outputs(twice, op.reference(**twice), [0])


def same_bits(a: Tensor, b: Tensor) -> bool:
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def check_near_reference(op: Op[..., Any], index: int) -> None:
    """The op gives what its reference gives, and leaves alone what the reference leaves alone."""
    ours, theirs = example_of(op, index), example_of(op, index)
    floats = [value.dtype for value in ours.values() if isinstance(value, Tensor) and value.dtype.is_floating_point]
    usual = op.tolerance[floats[0] if floats else torch.float32]
    got, wanted = op(**ours), op.reference(**theirs)
    for mine, reference in [(got, wanted), *zip(ours.values(), theirs.values())]:
        if isinstance(reference, Tensor):
            tolerance = op.tolerance.get(reference.dtype, usual)
            torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance, equal_nan=True)


def _run(op: Op[..., Any], index: int, rows: list[int] | None = None) -> tuple[Example, Any]:
    in_place = isinstance(op.rows, EachSlot)
    example = example_of(op, index) if in_place else examples_of(op)[index]
    if rows is not None:
        example = op.rows.take(example, rows)
    return example, op(**example)


def check_rows_independent(op: Op[..., Any], index: int) -> None:
    """Each row alone, and all rows in another order, and some of them, give the bits they give together."""
    count = op.rows.count(examples_of(op)[index])
    whole, result = _run(op, index)
    order = list(range(count))
    random.Random(index).shuffle(order)
    for rows in [order, order[: count // 2], *([row] for row in range(count))]:
        if not rows:
            continue
        part, partial = _run(op, index, rows)
        wanted = op.rows.outputs(whole, result, rows)
        got = op.rows.outputs(part, partial, list(range(len(rows))))
        assert same_bits(got, wanted), f"{op.name}, example {index}: rows {rows} differ from the whole call's"
