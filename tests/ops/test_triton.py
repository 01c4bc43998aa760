"""GPU bodies against their references: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"      # before Triton is imported
pytest.importorskip("triton")

from penstock.ops import OPS, Op  # noqa: E402
from penstock.ops import triton as bodies  # noqa: E402
from penstock.ops.attention import Work, attention, paged  # noqa: E402
from penstock.ops.sample import sample, waits  # noqa: E402
from tests.ops.check import example_of, examples_of  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
WITH_BODY = [op for op in OPS.values() if "cuda" in op.bodies]
CASES = [pytest.param(op, i, id=f"{op.name}-{i}") for op in WITH_BODY for i in range(len(examples_of(op)))]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def as_on_gpu(example: dict[str, Any]) -> dict[str, Any]:
    """On the device, keys beside each other as a GPU's cache has them."""
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in example.items()}
    if "k_cache" in moved:
        moved["k_cache"] = moved["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    return moved


def run(op: Op[..., Any], example: dict[str, Any]) -> Any:
    return op.bodies["cuda"].function(**example)


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float().cpu(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("op", "index"), CASES)
def test_near_reference(op: Op[..., Any], index: int) -> None:
    expected_example = example_of(op, index)
    if op.name == "product" and expected_example["x"].shape[0] != 1 and not ON_GPU:
        pytest.skip("cuBLAS computes it")
    expected = op.reference(**expected_example)
    example = as_on_gpu(example_of(op, index))
    found = run(op, example)
    first = next((value for value in expected_example.values() if torch.is_tensor(value) and value.is_floating_point()),
                 torch.zeros(0))
    caches = [example[name].dtype for name in ("k_cache",) if name in example]
    worst = max([first.dtype, *caches], key=lambda dtype: TOLERANCE.get(dtype, 0))
    for name in ("ids", "positions", "lengths", "slots", "table", "step_table"):
        if op.name == "single_inputs":
            assert example[name].tolist() == expected_example[name].tolist(), name
    if expected is not None:
        if expected.is_floating_point():
            near(found, expected, worst if worst in TOLERANCE else torch.bfloat16)
        else:
            assert found.tolist() == expected.tolist()
    for name in ("k_cache", "v_cache"):
        if name in example and example[name].dtype in TOLERANCE:
            near(example[name], expected_example[name], example[name].dtype)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("extra", [{}, {"window": 33}, {"softcap": 20.0}, {"alibi": torch.linspace(0.01, 0.5, 6)}])
def test_single_queries_and_tiles_in_one_step(num_parts: int, extra: dict[str, Any]) -> None:
    """Sequences of one query first, with one that is no one's among them, then others."""
    example = paged(3, [(1, 130), (1, 1), (1, 64), (1, 200), (7, 7), (40, 90)], 6, 2, 24, **extra)
    expected = attention.reference(**example)
    step = 128 // 3
    tiles = [(s, start) for s, count in ((4, 7), (5, 40)) for start in range(0, count, step)]
    given = as_on_gpu(example)
    given["lengths"][1] = 0
    work = Work(4, torch.tensor(tiles, dtype=torch.int32, device=DEVICE), num_parts)
    found = run(attention, given | {"work": work})
    used = [t for t in range(len(expected)) if t != 1]
    near(found[used], expected[used], torch.float32)


def test_draws_follow_the_probabilities() -> None:
    """Against softmax, over many positions and over many keys. Breaks if waits are not exponential or depend on each
    other."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, 1.0])
    count = 20_000
    for keys, positions in ((torch.full((count,), 77), torch.arange(count)), (torch.arange(count) << 21,
                                                                             torch.full((count,), 5))):
        tokens = sample.reference(logits.expand(count, 6), torch.full((count,), 0.7), keys, positions)
        expected = torch.softmax(logits / 0.7, -1) * count
        found = torch.bincount(tokens, minlength=6)
        assert ((found - expected).square() / expected).sum() < 20.5       # 5 degrees of freedom: one in a thousand


def test_waits_are_exponential() -> None:
    drawn = waits(torch.tensor([123456789123]), torch.tensor([3]), 1 << 17)[0].sort().values
    expected = -torch.log1p(-(torch.arange(1 << 17) + 0.5) / (1 << 17))
    assert (torch.exp(-drawn) - torch.exp(-expected)).abs().max() < 0.006  # Kolmogorov and Smirnov, one in a thousand


def test_bodies_are_named() -> None:
    assert {op.name for op in WITH_BODY} >= {"attention", "product", "sample", "qkv_write", "rms_norm"}
    assert bodies.__all__
