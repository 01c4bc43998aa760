"""What is asked of every body; each check raises AssertionError."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from penstock.ops import Op
from penstock.ops.registry import Example
from tests.ops.examples import example_of, examples_of, rows_of
from tests.ops.examples.case import tensors_of
from tests.ops.examples.rows import EachRowInPlace, EachSlot, EachState


def exact_reference(op: Op[..., Any], example: Example) -> Any:
    """What an exact body is near. Of 8-bit floats it rounds a row alone, too, as the reference does in company."""
    if not op.name.startswith("fp8") or rows_of(op).count(example) != 1:
        return op.reference(**example)
    twice = rows_of(op).take(example, [0, 0])
    return rows_of(op).outputs(twice, op.reference(**twice), [0])


def same_bits(a: Tensor, b: Tensor) -> bool:
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def results(result: Any) -> list[Any]:
    """List what a call returned."""
    return list(result) if isinstance(result, tuple) else [result]


def check_near_reference(op: Op[..., Any], index: int) -> None:
    """The op gives what its reference gives, and leaves alone what the reference leaves alone."""
    ours, theirs = example_of(op, index), example_of(op, index)
    floats = [value.dtype for value in tensors_of(ours) if value.dtype.is_floating_point]
    usual = op.tolerance[floats[0] if floats else torch.float32]
    got, wanted = results(op(**ours)), results(op.reference(**theirs))
    for mine, reference in [*zip(got, wanted, strict=True), *zip(tensors_of(ours), tensors_of(theirs))]:
        if isinstance(reference, Tensor):
            tolerance = op.tolerance.get(reference.dtype, usual)
            torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance, equal_nan=True)


def _run(op: Op[..., Any], index: int, rows: list[int] | None = None) -> tuple[Example, Any]:
    in_place = isinstance(rows_of(op), EachRowInPlace | EachSlot | EachState)
    example = example_of(op, index) if in_place else examples_of(op)[index]
    if rows is not None:
        example = rows_of(op).take(example, rows)
    return example, op(**example)


def check_rows_independent(op: Op[..., Any], index: int) -> None:
    """Each row alone, and all rows in another order, and some of them, give the bits they give together."""
    count = rows_of(op).count(examples_of(op)[index])
    whole, result = _run(op, index)
    order = list(range(count))
    random.Random(index).shuffle(order)
    for rows in [order, order[: count // 2], *([row] for row in range(count))]:
        if not rows:
            continue
        part, partial = _run(op, index, rows)
        wanted = rows_of(op).outputs(whole, result, rows)
        got = rows_of(op).outputs(part, partial, list(range(len(rows))))
        assert same_bits(got, wanted), f"{op.name}, example {index}: rows {rows} differ from the whole call's"
