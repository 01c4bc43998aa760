"""The bodies of the ops against their references, on the device."""

from __future__ import annotations

import copy
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock.ops import OPS
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import DEVICE
from tests.ops.check import exact_reference, results, same_bits
from tests.ops.examples import example_of, examples_of, rows_of
from tests.ops.examples.case import move, tensors_of

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.int8: 3e-2}
SOME = 3  # every so many examples, unless all are wanted
THREADS = 8  # that compile
WRITTEN = ("k_cache", "v_cache", "ids", "positions", "lengths", "slots", "table", "step_table", "last")


def _moved(example: dict[str, Any]) -> dict[str, Any]:
    """On the device, keys beside each other as a GPU's cache has them."""
    moved = {name: move(value, DEVICE) for name, value in example.items()}
    if "k_cache" in moved:
        moved["k_cache"] = moved["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    return moved


def _apart(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """The largest difference over what is tolerated."""
    if not expected.is_floating_point():
        most = 1 if expected.dtype == torch.int8 else 0  # a code may be rounded either way
        near = found.shape == expected.shape and bool(((found.cpu().long() - expected.long()).abs() <= most).all())
        return 0.0 if near else float("inf")
    a, b = found.cpu().double(), expected.double()
    alike = (a == b) | (a.isnan() & b.isnan())
    over = torch.where(alike, 0.0, (a - b).abs() / (tolerance * (1 + b.abs())))
    return float(over.nan_to_num(float("inf")).max()) if over.numel() else 0.0


def _compare(name: str, index: int, exact: bool = False) -> float:
    op = OPS[name]
    example = example_of(op, index)
    given = _moved(copy.deepcopy(example))
    expected = exact_reference(op, example) if exact else op.reference(**example)
    found = (op.exact_bodies if exact else op.bodies)["cuda"].function(**given)
    dtypes = [value.dtype for value in tensors_of(example) if value.dtype in TOLERANCE]
    own = op.tolerance.get(dtypes[0] if dtypes else torch.float32, 0.0)
    tolerance = max([own, *(TOLERANCE[dtype] for dtype in dtypes)])
    pairs = [
        *zip(results(found), results(expected)),
        *((given[key], example[key]) for key in WRITTEN if key in example),
    ]
    return max((_apart(a, b, tolerance) for a, b in pairs if b is not None), default=0.0)


def _is_for_gpus(example: dict[str, Any]) -> bool:
    """Return False for what models on a GPU refuse: trees of drafts, and caches of 4 bits."""
    return example.get("tail") is None and ("k_cache" not in example or example["k_cache"].dtype is not torch.uint8)


@check([(name,) for name, op in OPS.items() if "cuda" in op.bodies])
def op(name: str) -> Figures:
    if DEVICE == "cpu":
        raise Skip("kernels need a GPU")
    every = 1 if os.environ.get("PENSTOCK_ALL_EXAMPLES") else SOME
    given = examples_of(OPS[name])
    indices = [index for index in range(0, len(given), every) if _is_for_gpus(given[index])]
    with ThreadPoolExecutor(THREADS) as threads:
        apart = list(threads.map(lambda index: _compare(name, index), indices))
    wrong = [index for index, value in zip(indices, apart) if value > 1]
    require(not wrong, f"examples {wrong} differ by up to {max(apart):.3g} times what is tolerated")
    return {"examples": len(indices), "of what is tolerated": max(apart)}


def _is_independent(name: str, index: int) -> bool:
    """Whether rows in another order, and one alone, get the bits they get together."""
    op = OPS[name]
    order = list(range(rows_of(op).count(examples_of(op)[index])))
    random.Random(index).shuffle(order)
    whole = _moved(example_of(op, index))
    result = op.exact_bodies["cuda"].function(**whole)
    for rows in (order, order[-1:]):
        part = _moved(rows_of(op).take(example_of(op, index), rows))
        partial = op.exact_bodies["cuda"].function(**part)
        if not same_bits(
            rows_of(op).outputs(part, partial, list(range(len(rows)))).cpu(),
            rows_of(op).outputs(whole, result, rows).cpu(),
        ):
            return False
    return True


@check([(name,) for name, op in OPS.items() if "cuda" in op.exact_bodies])
def exact_op(name: str) -> Figures:
    """Rows are independent; a body that is not the usual one is near the reference, too."""
    if DEVICE == "cpu":
        raise Skip("kernels need a GPU")
    op = OPS[name]
    indices = [
        index
        for index, example in enumerate(examples_of(op))
        if rows_of(op).count(example)
        and _is_for_gpus(example)
        and "k_scale" not in example
        and example.get("window", 0) >= 0  # negative for chunks
    ]
    with ThreadPoolExecutor(THREADS) as threads:
        alike = list(threads.map(lambda index: _is_independent(name, index), indices))
        own = op.exact_bodies["cuda"] is not op.bodies["cuda"]
        apart = list(threads.map(lambda index: _compare(name, index, True), indices if own else []))
    dependent = [index for index, value in zip(indices, alike) if not value]
    require(not dependent, f"rows of examples {dependent} depend on their company")
    wrong = [index for index, value in zip(indices, apart) if value > 1]
    require(not wrong, f"examples {wrong} differ by up to {max(apart, default=0.0):.3g} times what is tolerated")
    return {"examples": len(indices), "of what is tolerated": max(apart, default=0.0)}
