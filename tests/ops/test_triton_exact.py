"""Exact GPU bodies: near their references, and the same bits for a row in any company. On a GPU where there is one,
else through Triton's interpreter."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

import penstock.ops.triton.bodies  # noqa: E402, F401  registers the bodies
from penstock.ops import OPS, Op  # noqa: E402
from penstock.ops.attention.attention import Work, attention  # noqa: E402
from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue  # noqa: E402
from penstock.ops.matmul.fp8_mlp import fp8_mlp  # noqa: E402
from penstock.ops.matmul.fp8_product import fp8_group_product, fp8_product, quantize_fp8, widen_groups  # noqa: E402
from penstock.ops.matmul.int_product import int_product  # noqa: E402
from penstock.ops.matmul.product import product  # noqa: E402
from penstock.ops.triton import tuning  # noqa: E402
from penstock.ops.triton.exact import attention as exact_attention  # noqa: E402
from penstock.ops.triton.exact import fp8_groups as exact_fp8_groups  # noqa: E402
from penstock.ops.triton.exact import product as exact_product  # noqa: E402
from tests.ops.check import exact_reference, same_bits  # noqa: E402
from tests.ops.examples import example_of, examples_of, normal, rows_of  # noqa: E402
from tests.ops.examples.attention import paged  # noqa: E402
from tests.ops.examples.case import move, with_epilogue  # noqa: E402
from tests.ops.examples.matmul import fp8_groups, int_weight  # noqa: E402
from tests.ops.interpreter import steady_dots  # noqa: E402, F401  a fixture

pytestmark = pytest.mark.usefixtures("steady_dots")
DEVICE = "cuda" if ON_GPU else "cpu"
OWN: list[Op[..., Any]] = [product, attention]
if ON_GPU:  # the interpreter rounds 8-bit floats its own way
    OWN += [fp8_product, fp8_mlp]
CASES = [
    pytest.param(op, i, id=f"{op.name}-{i}")
    for op in OWN
    for i in range(len(examples_of(op)))
    if "k_scale" not in examples_of(op)[i] and examples_of(op)[i].get("window", 0) >= 0
]
EXACT = [op for op in OPS.values() if "cuda" in op.exact_bodies and (ON_GPU or op not in OWN)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SMALL = (1, (40, 96)), (2, (48, 96)), (3, (40, 48))
COUNTS = (1, 15, 16, 17, 33, 64, 65, 130)
REAL = [
    (4096, 6144, False),
    (4096, 4096, False),
    (4096, 28672, True),
    (14336, 4096, False),
    (1024, 4096, False),
    (1024, 6144, True),
    (3072, 1024, False),
    (576, 1536, True),
    (576, 49152, False),
]


def on_device(example: dict[str, Any]) -> dict[str, Any]:
    """There, keys beside each other as a GPU's cache has them."""
    moved = {name: move(value, DEVICE) for name, value in example.items()}
    if "k_cache" in moved:
        moved["k_cache"] = moved["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    return moved


def run(op: Op[..., Any], example: dict[str, Any]) -> Any:
    return op.exact_bodies["cuda"].function(**example)


@pytest.mark.parametrize(("op", "index"), CASES)
def test_near_reference(op: Op[..., Any], index: int) -> None:
    example = example_of(op, index)
    dtypes = [value.dtype for value in example.values() if torch.is_tensor(value) and value.dtype in TOLERANCE]
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes) if op in (product, attention) else 0.1
    if any(part is not None and part is not False for part in example.get("epilogue", ())):  # its sums are rounded too
        tolerance *= 2
    found = run(op, on_device(example))
    torch.testing.assert_close(
        found.float().cpu(), exact_reference(op, example_of(op, index)).float(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("examples", ["some", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", EXACT, ids=lambda op: op.name)
def test_rows_are_independent(op: Op[..., Any], examples: str) -> None:
    """Rows in another order, and one alone; of whatever says that it is exact."""
    indices = [
        index
        for index, example in enumerate(examples_of(op))
        if rows_of(op).count(example) and "k_scale" not in example and example.get("tail") is None
        if example.get("window", 0) >= 0
        and (ON_GPU or op is not int_product or example["x"].dtype != torch.bfloat16)  # which the interpreter lacks
    ]
    for index in indices[:: -1 if examples == "all" else -3]:
        count = rows_of(op).count(examples_of(op)[index])
        whole = on_device(example_of(op, index))
        result = run(op, whole)
        order = list(range(count))
        random.Random(index).shuffle(order)
        for rows in (order if ON_GPU else order[:9], order[-1:]):
            part = on_device(rows_of(op).take(example_of(op, index), rows))
            partial = run(op, part)
            assert same_bits(
                rows_of(op).outputs(part, partial, list(range(len(rows)))).cpu(),
                rows_of(op).outputs(whole, result, rows).cpu(),
            ), f"{op.name}, example {index}, rows {rows}"


def product_call(width: int, num_out: int, gated: bool, dtype: torch.dtype, num_rows: int) -> dict[str, Any]:
    size = num_out // 2 if gated else num_out
    return on_device(
        with_epilogue(
            {
                "x": normal(1, num_rows, width, dtype=dtype),
                "weight": normal(2, num_out, width, scale=0.1, dtype=dtype),
                "bias": normal(3, num_out),
                "residual": None if gated else normal(4, num_rows, size, dtype=dtype),
                "activation": "silu" if gated else None,
                "gated": gated,
                "norm": None,
                "eps": 1e-5,
            }
        )
    )


def check_products(op: Op[..., Any], call: dict[str, Any], counts: tuple[int, ...]) -> None:
    """So many of the rows of a call, in any order."""

    def result(rows: list[int]) -> torch.Tensor:
        found: torch.Tensor = run(op, rows_of(op).take(call, rows))
        return found.cpu()

    most = call["x"].shape[0]
    whole = result(list(range(most)))
    for count in counts:
        rows = random.Random(count).sample(range(most), min(count, most))
        assert same_bits(result(rows), whole[rows]), f"{count} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
def test_products_of_any_number_of_rows(gated: bool, dtype: torch.dtype) -> None:
    """Breaks if the order of a sum follows from the number of rows. Inputs in several parts, the last one not full."""
    call = product_call(550 if dtype == torch.float32 else 1064, 72, gated, dtype, 70)
    check_products(product, call, COUNTS if ON_GPU else (1, 16, 17, 33, 65))


@pytest.mark.parametrize("adds", [True, False])
def test_a_library_that_sums_otherwise_is_not_used(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the algorithms that are listed, the first that gives the bits of our own kernel is taken."""
    asked = []

    def multiply(algorithm: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, adds: bool) -> bool:
        asked.append(algorithm)
        if algorithm == "refused":
            return False
        epilogue = Epilogue(residual=out.clone()) if adds else NO_EPILOGUE
        out.copy_(run(product, {"x": x, "weight": weight, "epilogue": epilogue}))
        if algorithm == "splits":
            out[-1, -1] = torch.nextafter(out[-1, -1].float(), torch.tensor(torch.inf, device=DEVICE)) * 1.01
        return True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(exact_product, "multiply", multiply)
    monkeypatch.setattr(exact_product, "list_unsplit", lambda size: iter(("splits", "refused", "right", "later")))
    x, weight, out = (on_device({"": normal(seed, *shape, dtype=torch.bfloat16)})[""] for seed, shape in SMALL)
    unsplit = exact_product.Unsplit()
    expected = run(product, {"x": x, "weight": weight, "epilogue": Epilogue(residual=out.clone() if adds else None)})
    assert unsplit.multiply(x, weight, out, adds) and same_bits(out.cpu(), expected.cpu())
    assert asked == ["splits", "refused", "right", "right"]
    assert unsplit.multiply(x, weight, out, adds) and asked[4:] == ["right"]
    monkeypatch.setattr(exact_product, "list_unsplit", lambda size: iter(("splits",)))
    assert not exact_product.Unsplit().multiply(x, weight, out, adds)


def test_few_sizes_are_asked_for() -> None:
    assert [tuning.round_exact_rows(count) for count in (33, 48, 49, 1024, 1025, 16384)] == [
        48,
        48,
        64,
        1024,
        1056,
        16384,
    ]
    assert len({tuning.round_exact_rows(count) for count in range(33, 16385)}) < 250


@pytest.mark.parametrize("gated", [True, False])
def test_products_of_8_bit_floats(gated: bool) -> None:
    call = product_call(1040, 32, gated, torch.bfloat16, 20)
    weight, scale = quantize_fp8(call.pop("weight").cpu())
    check_products(fp8_product, call | on_device({"weight": weight, "scale": scale}), (1, 17))


CODES = [(8, 0), (8, 4), (4, 2), (4, 4)]  # bits and sets


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("bits", "sets"), CODES)
def test_products_of_codes(bits: int, sets: int, gated: bool) -> None:
    """Few rows, whose weights are dequantized in registers, as many, whose are before: breaks if one of them rounds a
    weight another way. Inputs that fill no pair, outputs that fill no tile."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    call = product_call(1000 if ON_GPU else 200, 72, gated, dtype, 140)
    call.pop("weight")
    words, scales = int_weight(bits, bits, 72, call["x"].shape[1], sets)
    call |= on_device({"words": words, "scales": scales, "num_out": 72})
    check_products(int_product, call, COUNTS if ON_GPU else (1, 17, 128))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("group", [128, 32])
def test_products_of_8_bit_floats_in_groups(group: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise; the values are those of the widened matrix, and so are the products."""
    monkeypatch.setattr(exact_fp8_groups, "MAX_FP8_TILE_ROWS", 134)  # a tile and some rows
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    call = product_call(1040 if ON_GPU else 272, 80, gated, dtype, 140)
    call.pop("weight")
    codes, scale = fp8_groups(1, 80, call["x"].shape[1], group)
    given = call | on_device({"weight": codes, "scale": scale, "group": group})
    check_products(fp8_group_product, given, COUNTS if ON_GPU else (1, 17, 134))
    wide = on_device({"weight": widen_groups(codes, scale, group).to(dtype)})
    residual = call["epilogue"].residual
    again = call["epilogue"]._replace(residual=None if residual is None else residual.clone())
    first = call["epilogue"]._replace(residual=None if residual is None else residual.clone())
    assert same_bits(
        run(fp8_group_product, given | {"epilogue": first}).cpu(), run(product, call | wide | {"epilogue": again}).cpu()
    )


@pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "fp8"])
@pytest.mark.parametrize(("width", "num_out", "gated"), REAL)
def test_products_of_real_shapes(width: int, num_out: int, gated: bool, kind: str) -> None:
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    call = product_call(width, num_out, gated, dtype, 2500)
    if kind == "fp8":
        weight, scale = quantize_fp8(call.pop("weight"))
        check_products(fp8_product, call | {"weight": weight, "scale": scale}, (*COUNTS, 256, 700, 2048))
    else:
        check_products(product, call, (*COUNTS, 256, 700, 2048))


EXTRAS: list[dict[str, Any]] = [
    {},
    {"window": 33},
    {"alibi": torch.linspace(0.01, 0.5, 3)},
    {"block": 4, "dtype": torch.bfloat16, "window": 600},
]
MORE: list[dict[str, Any]] = [{"window": 700}, {"softcap": 20.0}, {"dtype": torch.float16}]


def chunks(example: dict[str, Any], s: int, cuts: list[int]) -> torch.Tensor:
    """The queries of sequence s in steps that end there, one after the other."""
    first, last = example["query_start"][s : s + 2].tolist()
    length = int(example["lengths"][s])
    begin, found = length - (last - first), []
    for start, end in zip([begin, *cuts], [*cuts, length]):
        found.append(
            run(
                attention,
                example
                | {
                    "q": example["q"][first + start - begin : first + end - begin],
                    "table": example["table"][s : s + 1],
                    "query_start": torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
                    "lengths": torch.tensor([end], dtype=torch.int32, device=DEVICE),
                },
            )
        )
    return torch.cat(found)


@pytest.mark.parametrize(
    "extra",
    [*EXTRAS, *(pytest.param(extra, marks=pytest.mark.slow) for extra in MORE)],
    ids=lambda extra: "-".join(extra) or "plain",
)
def test_attention_along_any_road(extra: dict[str, Any]) -> None:
    """Tiles of a prompt, chunks of it cut anywhere, its queries one by one with their parts side by side or not: they
    get the same. Breaks if a part begins where a chunk does, or if keys that are not seen leave a trace."""
    example = on_device(paged(3, [(26, 1050), (9, 9), (3, 514)], 3, 1, 24, **extra))
    together = run(attention, example).cpu()
    assert same_bits(chunks(example, 0, [1025, 1026, 1049]).cpu(), together[:26])
    assert same_bits(chunks(example, 1, [4]).cpu(), together[26:35])
    rows = [0, 1, 25, 26, 34, 36, 37]
    single = on_device(rows_of(attention).take(example, rows))
    for num_kv_splits in (1, exact_attention.count_splits(len(rows), 1050, 1)):
        work = Work(len(rows), None, num_kv_splits)
        assert same_bits(run(attention, single | {"work": work}).cpu(), together[rows])


def test_enough_splits_for_the_longest_sequence() -> None:
    size, most = tuning.EXACT_SPLIT_POSITIONS, tuning.MIN_EXACT_ATTENTION_PROGRAMS
    assert [exact_attention.count_splits(1, length, 8) for length in (1, size, size + 1, 9 * size)] == [1, 1, 2, 16]
    assert exact_attention.count_splits(most // 8, 9 * size, 8) == 1


def test_single_queries_and_tiles_in_one_step() -> None:
    """With one that is no one's among them."""
    example = on_device(paged(3, [(1, 530), (1, 1), (1, 64), (7, 7), (40, 590)], 6, 2, 24))
    expected = run(attention, example)
    example["lengths"][1] = 0
    step = exact_attention.tile_tokens(6, 2)
    tiles = [(s, start) for s, count in ((3, 7), (4, 40)) for start in range(0, count, step)]
    work = Work(3, torch.tensor(tiles, dtype=torch.int32, device=DEVICE))
    used = [t for t in range(len(expected)) if t != 1]
    assert same_bits(run(attention, example | {"work": work})[used].cpu(), expected[used].cpu())


def test_what_lies_before_a_window_is_not_read() -> None:
    """A table keeps the blocks that a row has given up; they may hold anything by now."""
    example = paged(7, [(1, 150), (1, 90), (1, 1200)], 4, 2, 16, window=33)
    given = on_device(example)
    others = torch.full((1, *given["k_cache"].shape[1:]), torch.nan, device=DEVICE)
    given["k_cache"] = torch.cat((given["k_cache"], others)).transpose(2, 3).contiguous().transpose(2, 3)
    given["v_cache"] = torch.cat((given["v_cache"], others.transpose(2, 3))).contiguous()
    given["table"] = torch.where(given["table"] < 0, len(given["k_cache"]) - 1, given["table"])
    for work in (None, Work(3), Work(3, None, exact_attention.count_splits(3, 1200, 2))):
        torch.testing.assert_close(
            run(attention, given | {"work": work}).cpu(), attention.reference(**example), rtol=2e-5, atol=2e-5
        )


@pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 1, 256)])
def test_attention_of_real_shapes(heads: tuple[int, int, int]) -> None:
    example = on_device(paged(5, [(300, 3000), (130, 130), (64, 1025)], *heads, dtype=torch.bfloat16))
    example["q"] = example["q"].bfloat16()
    together = run(attention, example).cpu()
    assert same_bits(chunks(example, 0, [2701, 2760, 2816, 2999]).cpu(), together[:300])
    rows = [*range(0, 300, 7), 299, 300, 429, 430, 493]
    single = on_device(rows_of(attention).take(example, rows))
    for num_kv_splits in (1, exact_attention.count_splits(1, 3000, 1)):
        work = Work(len(rows), None, num_kv_splits)
        assert same_bits(run(attention, single | {"work": work}).cpu(), together[rows])


def test_the_checks_can_fail() -> None:
    """The fast attention, whose parts begin elsewhere for other numbers of them."""
    example = on_device(paged(3, [(1, 1100)], 6, 2, 24))
    few, many = (attention.bodies["cuda"].function(**example, work=Work(1, None, parts)) for parts in (1, 3))
    assert not same_bits(few.cpu(), many.cpu())
