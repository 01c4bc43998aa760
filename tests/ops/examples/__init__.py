"""Calls that every body of an op is tested with, one file per room of `penstock.ops`."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from penstock.ops import Op
from penstock.ops.registry import Example
from tests.ops.examples import attention, elementwise, experts, latent, lora, matmul, recurrent, sampling, trees
from tests.ops.examples.case import CASES, integers, normal, permutation
from tests.ops.examples.rows import Rows

__all__ = [
    "attention",
    "elementwise",
    "example_of",
    "examples_of",
    "experts",
    "integers",
    "latent",
    "lora",
    "matmul",
    "normal",
    "permutation",
    "recurrent",
    "rows_of",
    "sampling",
    "trees",
]


@cache
def examples_of(op: Op[..., Any]) -> tuple[Example, ...]:
    assert op.name in CASES, f"op {op.name} has no examples: add them to tests/ops/examples"
    return tuple(CASES[op.name].calls())


def example_of(op: Op[..., Any], index: int) -> Example:
    """A fresh copy, views of one storage still sharing one: ops may write into their arguments."""
    return copy.deepcopy(examples_of(op)[index])


def rows_of(op: Op[..., Any]) -> Rows:
    return CASES[op.name].rows
