"""GPU bodies against their references: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

import penstock.ops.triton.bodies  # noqa: E402, F401  registers the bodies
from penstock.ops import OPS, Op, RouterRule  # noqa: E402
from penstock.ops.attention.attention import Shared, Work, attention  # noqa: E402
from penstock.ops.sampling.sample import sample  # noqa: E402
from penstock.ops.triton.experts.sort import sort_pairs  # noqa: E402
from tests.ops.check import results  # noqa: E402
from tests.ops.examples import example_of, examples_of, integers  # noqa: E402
from tests.ops.examples.attention import paged  # noqa: E402
from tests.ops.examples.case import move  # noqa: E402
from tests.ops.interpreter import steady_dots  # noqa: E402, F401  a fixture

DEVICE = "cuda" if ON_GPU else "cpu"
WITH_BODY = [op for op in OPS.values() if "cuda" in op.bodies]


def takes_long(op: Op[..., Any], index: int) -> bool:
    """Through the interpreter: many outputs of one row, in every dtype."""
    if op.name == "int_product":
        return examples_of(op)[index]["x"].dtype != torch.bfloat16
    return (op.name, index) == ("fp8_mlp", 1)


CASES = [
    pytest.param(op, i, id=f"{op.name}-{i}", marks=[pytest.mark.slow] if takes_long(op, i) else [])
    for op in WITH_BODY
    for i in range(len(examples_of(op)))
    if examples_of(op)[i].get("tail") is None  # trees are drafted on a CPU
    if examples_of(op)[i].get("window", 0) >= 0  # chunks are read on a CPU only
]
BY_CUBLAS = ("product", "fp8_product", "int_product", "fp8_mlp", "grouped_fp8_product")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def as_on_gpu(example: dict[str, Any]) -> dict[str, Any]:
    """On the device, keys beside each other as a GPU's cache has them."""
    moved = {name: move(value, DEVICE) for name, value in example.items()}
    if "k_cache" in moved:
        moved["k_cache"] = moved["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    return moved


def run(op: Op[..., Any], example: dict[str, Any]) -> Any:
    return op.bodies["cuda"].function(**example)


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float().cpu(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("op", "index"), CASES)
def test_near_reference(op: Op[..., Any], index: int, steady_dots: None) -> None:  # noqa: F811
    expected_example = example_of(op, index)
    if op.name in BY_CUBLAS and expected_example["x"].shape[0] != 1 and not ON_GPU:
        pytest.skip("cuBLAS computes it, or the interpreter would round to 8-bit floats its own way")
    expected = op.reference(**expected_example)
    example = as_on_gpu(example_of(op, index))
    found = run(op, example)
    first = next(
        (value for value in expected_example.values() if torch.is_tensor(value) and value.is_floating_point()),
        torch.zeros(0),
    )
    caches = [example[name].dtype for name in ("k_cache",) if name in example]
    worst = max([first.dtype, *caches], key=lambda dtype: TOLERANCE.get(dtype, 0))
    for name in ("ids", "positions", "lengths", "slots", "table", "step_table"):
        if op.name == "single_inputs" and example[name] is not None:
            assert example[name].tolist() == expected_example[name].tolist(), name
    for got, wanted in zip(results(found), results(expected)):
        if wanted is not None and wanted.is_floating_point():
            near(got, wanted, worst if worst in TOLERANCE else torch.bfloat16)
        elif wanted is not None:
            assert got.tolist() == wanted.tolist()
    for name in ("k_cache", "v_cache"):
        if name in example and example[name].dtype in TOLERANCE:
            near(example[name], expected_example[name], example[name].dtype)


@pytest.mark.parametrize("num_kv_splits", [1, 2, 5])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"window": 33},
        {"softcap": 20.0},
        {"alibi": torch.linspace(0.01, 0.5, 6)},
        {"sinks": torch.linspace(-3, 9, 6)},
    ],
)
def test_single_queries_and_tiles_in_one_step(num_kv_splits: int, extra: dict[str, Any]) -> None:
    """Sequences of one query first, with one that is no one's among them, then others."""
    example = paged(3, [(1, 130), (1, 1), (1, 64), (1, 200), (7, 7), (40, 90)], 6, 2, 24, **extra)
    expected = attention.reference(**example)
    step = 128 // 3
    tiles = [(s, start) for s, count in ((4, 7), (5, 40)) for start in range(0, count, step)]
    given = as_on_gpu(example)
    given["lengths"][1] = 0
    work = Work(4, torch.tensor(tiles, dtype=torch.int32, device=DEVICE), num_kv_splits)
    found = run(attention, given | {"work": work})
    used = [t for t in range(len(expected)) if t != 1]
    near(found[used], expected[used], torch.float32)


@pytest.mark.parametrize("work", [True, False])
def test_what_lies_before_a_window_is_not_read(work: bool) -> None:
    """A table keeps the blocks that a row has given up; they may hold anything by now."""
    lengths = [150, 90, 200]
    example = paged(7, [(1, length) for length in lengths], 4, 2, 16, window=33)
    expected = attention.reference(**example)
    given = as_on_gpu(example)
    others = torch.full((1, *given["k_cache"].shape[1:]), torch.nan, device=DEVICE)
    given["k_cache"] = torch.cat((given["k_cache"], others)).transpose(2, 3).contiguous().transpose(2, 3)
    given["v_cache"] = torch.cat((given["v_cache"], others.transpose(2, 3))).contiguous()
    given["table"] = torch.where(given["table"] < 0, len(given["k_cache"]) - 1, given["table"])
    found = run(attention, given | ({"work": Work(3, None, 2)} if work else {}))
    near(found, expected, torch.float32)


@pytest.mark.parametrize("num_kv_splits", [1, 3])
@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 20.0}, {"alibi": torch.linspace(0.01, 0.5, 6)}, {"sinks": torch.linspace(-3, 9, 6)}]
)
def test_common_positions_are_read_once_for_all(num_kv_splits: int, extra: dict[str, Any]) -> None:
    """Two groups with prefixes of their own, and sequences that share nothing."""
    lengths = [100, 70, 40, 90, 120, 65, 77, 130]
    example = paged(5, [(1, length) for length in lengths], 6, 2, 24, **extra)
    example["table"][[3, 4, 7], :4] = example["table"][0, :4]
    example["table"][6, :2] = example["table"][1, :2]
    expected = attention.reference(**example)
    members = torch.tensor([0, 3, 4, 7, 1, 6, 0, 0], dtype=torch.int32, device=DEVICE)
    skips = torch.tensor([64, 32, 0, 64, 64, 0, 32, 64], dtype=torch.int32, device=DEVICE)
    tiles = torch.tensor([[0, 3, 0, 64], [3, 1, 3, 64], [4, 2, 1, 32], [0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    work = Work(8, None, num_kv_splits, Shared(members, skips, tiles, 2))
    near(run(attention, as_on_gpu(example) | {"work": work}), expected, torch.float32)


@pytest.mark.parametrize("count", [4000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_draws_follow_the_probabilities(count: int) -> None:
    """Against softmax, over many positions and over many keys. Breaks if draws depend on each other."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, 1.0])
    for keys, positions in (
        (torch.full((count,), 77), torch.arange(count)),
        (torch.arange(count) << 21, torch.full((count,), 5)),
    ):
        tokens = sample.reference(logits.expand(count, 6), torch.full((count,), 0.7), keys, positions)
        expected = torch.softmax(logits / 0.7, -1) * count
        found = torch.bincount(tokens, minlength=6)
        assert ((found - expected).square() / expected).sum() < 20.5  # 5 degrees of freedom: one in a thousand


@pytest.mark.parametrize("count", [2000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_draws_over_many_pieces(count: int) -> None:
    """A token of each of three pieces, the likeliest in the last."""
    logits = torch.full((count, 9000), -torch.inf)
    logits[:, 5], logits[:, 4100], logits[:, 8999] = 0.0, 1.0, 2.0
    tokens = sample.reference(logits, torch.ones(count), torch.arange(count) << 13, torch.arange(count) % 7)
    expected = torch.softmax(torch.tensor([0.0, 1.0, 2.0]), -1) * count
    found = torch.tensor([(tokens == token).sum() for token in (5, 4100, 8999)])
    assert found.sum() == count and ((found - expected).square() / expected).sum() < 13.8  # one in a thousand


@pytest.mark.parametrize("num_tokens", [1, 21])
def test_fp8_rows_that_8_bits_hold(num_tokens: int, steady_dots: None) -> None:  # noqa: F811
    """Integers up to 7 are multiples of a row's scale, and so are the weights: the sums are exact."""
    x = integers(1, 8, num_tokens, 64).half()
    x[:, 0] = 7
    codes = integers(2, 5, 4 * 16, 64).to(torch.float8_e4m3fn)
    ids = torch.tensor([[0, 3], [2, -1], [1, 3]], dtype=torch.int32).repeat(7, 1)[:num_tokens]
    example = {"x": x, "codes": codes, "scale": torch.full((64,), 0.25), "ids": ids, "num_matrices": 4}
    expected = OPS["grouped_fp8_product"].reference(**example)
    for bodies in (OPS["grouped_fp8_product"].bodies, OPS["grouped_fp8_product"].exact_bodies):
        assert torch.equal(bodies["cuda"].function(**as_on_gpu(example)).cpu(), expected)


@pytest.mark.parametrize(("experts", "rule"), [(8, RouterRule(3)), (32, RouterRule(4, "sigmoid", num_groups=4))])
def test_damaged_logits_choose_different_experts(experts: int, rule: RouterRule) -> None:
    """Whose weights are damaged, too. Ids out of range, or one twice, would read what is nobody's."""
    logits = torch.stack([torch.full((experts,), value) for value in (torch.nan, torch.inf, -torch.inf)])
    logits = torch.cat([logits, torch.where(torch.arange(experts) % 2 == 0, torch.nan, 1.0)[None]])
    ids, weights = OPS["route"].bodies["cuda"].function(logits.to(DEVICE), None, rule)
    assert all(0 <= a < b < experts for row in ids.tolist() for a, b in pairwise(row))
    assert rule.score == "sigmoid" or weights.isnan().any(1).all()


def test_pairs_are_sorted_into_tiles_of_any_routing() -> None:
    """All rows to one matrix, to none, and to all."""
    for seed, ids in enumerate(
        (
            torch.full((50, 2), 3),
            torch.full((7, 2), -1),
            integers(1, 12, 400, 1) - 1,
            torch.tensor([[0, 1], [-1, 11]]),
            torch.full((40, 1), 11),
        )
    ):
        order, tiles = sort_pairs(ids.int().to(DEVICE), 12, 16)
        flat, seen = ids.flatten().tolist(), []
        for matrix, first, count in tiles.tolist():
            pairs = order[first : first + count].tolist()
            assert count <= 16 and all(flat[pair] == matrix for pair in pairs), seed
            seen += pairs
        assert sorted(seen) == list(range(len(flat))), seed
        assert [flat[pair] % 13 for pair in seen] == sorted(value % 13 for value in flat)


def test_bodies_are_named() -> None:
    assert {op.name for op in WITH_BODY} >= {"attention", "product", "sample", "qkv_write", "rms_norm"}
