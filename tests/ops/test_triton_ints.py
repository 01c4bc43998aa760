"""Products with weights of integers, of all numbers of rows, against the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

from penstock.ops.experts.grouped_product import grouped_int_product  # noqa: E402
from penstock.ops.matmul.epilogue import Epilogue  # noqa: E402
from penstock.ops.matmul.int_product import (  # noqa: E402
    dequantize_ints,  # noqa: E402
    int_product,
    pack_codes,
    pack_scales,
    unpack_codes,
)
from penstock.ops.matmul.int_rows import int_rows  # noqa: E402
from penstock.ops.triton import tuning  # noqa: E402
from penstock.ops.triton.experts import grouped_ints  # noqa: E402
from penstock.ops.triton.matmul import int_dot, int_gemv  # noqa: E402
from penstock.ops.triton.matmul import int_product as bodies  # noqa: E402
from penstock.ops.triton.matmul.int_rows import dequantize  # noqa: E402
from penstock.ops.triton.tuning import INT_TILE_ROWS, MAX_INT_TILE_ROWS  # noqa: E402
from tests.ops.check import same_bits  # noqa: E402
from tests.ops.examples import example_of, examples_of, normal  # noqa: E402
from tests.ops.examples.case import move, with_epilogue  # noqa: E402
from tests.ops.examples.matmul import int_weight  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter multiplies no bfloat16 matrices
BITS = pytest.mark.parametrize("bits", [8, 4])
FILES = pytest.mark.parametrize(("bits", "sets"), [(8, 2), (8, 4), (4, 4)])  # the layouts of files' blocks


def product_of(
    bits: int,
    num_rows: int,
    width: int,
    num_out: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    activation: str | None = None,
    bias: bool = False,
    residual: bool = False,
    normed: bool = False,
    sets: int | None = None,
) -> None:
    words, scales = int_weight(bits, bits, num_out, width, sets)
    size = num_out // 2 if gated else num_out
    given: dict[str, Any] = {
        "x": normal(1, num_rows, width, dtype=dtype),
        "words": words,
        "scales": scales,
        "num_out": num_out,
        "bias": normal(2, num_out) if bias else None,
        "residual": normal(3, num_rows, size, dtype=dtype) if residual else None,
        "activation": activation,
        "gated": gated,
        "norm": normal(4, width) if normed else None,
        "eps": 1e-5 if normed else 0.0,
    }
    given = with_epilogue(given)
    expected = int_product.reference(**given)
    moved = {name: move(value, DEVICE) for name, value in given.items()}
    found = int_product.bodies["cuda"].function(**moved)
    tolerance = int_product.tolerance[dtype]
    torch.testing.assert_close(found.float().cpu(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What `int_tile_shape` has given: outputs, rows, pairs, warps and tiles."""
    shapes: list[tuple[int, ...]] = []
    shape_of = tuning.int_tile_shape

    def kept(num_rows: int, num_out: int, num_pairs: int) -> tuple[int, int, int, int, int]:
        shapes.append(shape := shape_of(num_rows, num_out, num_pairs))
        return shape

    monkeypatch.setattr(bodies, "int_tile_shape", kept)
    return shapes


@BITS
@pytest.mark.parametrize("num_rows", [2, 16, 17, 33, 64])
def test_few_rows(bits: int, num_rows: int, taken: list[tuple[int, ...]]) -> None:
    """Each tile of a small weight, at its edges; inputs in several parts, the last of them short; outputs that fill no
    tile."""
    product_of(bits, num_rows, 800, 80, HALF, bias=True, residual=True, activation="silu")
    assert [shape[:2] for shape in taken] == [(64, next(size for size in INT_TILE_ROWS if size >= num_rows))]


@BITS
@pytest.mark.parametrize(
    ("large", "outputs", "num_rows"),
    [(1 << 40, 128, 17), (1 << 40, 128, 64), (1, 64, 9), (1, 256, 30), (1, 256, 65), (1, 256, 128)],
)
def test_tiles_of_many_outputs(
    bits: int, large: int, outputs: int, num_rows: int, taken: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MIN_WIDE_TILE_OUTPUTS", 1)
    for module in (bodies, tuning):
        monkeypatch.setattr(module, "MIN_LARGE_WEIGHT", large)
    product_of(bits, num_rows, 192, 272, HALF, gated=True, activation="silu", normed=True)
    product_of(bits, num_rows, 130, 17, HALF, bias=True)
    assert {shape[0] for shape in taken} == {outputs} and len(taken) == 2


@pytest.fixture(params=[(False, 1), (True, 2), (False, 8)])
def dotted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One row by integer dot products whatever the weight, in each shape of a program; lists those that were asked."""
    two, pairs = request.param
    asked: list[bool] = []

    def find_shape(num_out: int, num_pairs: int, bits: int, is_gated: bool) -> tuning.DotShape:
        asked.append(is_gated)
        return tuning.DotShape(two or is_gated, pairs, 4)

    monkeypatch.setattr(bodies, "MAX_INT_GEMV_VALUES", 0)
    monkeypatch.setattr(int_dot, "int_dot_shape", find_shape)
    return asked


@pytest.mark.parametrize(("bits", "sets"), [(8, None), (4, None), (8, 2), (8, 4), (4, 4)])
def test_one_row_of_a_large_weight(bits: int, sets: int | None, dotted: list[bool]) -> None:
    """Panels that are not full, an odd number of them, inputs that fill no group, gates and ups in one panel."""
    product_of(bits, 1, 192, 48, HALF, normed=True, gated=True, activation="silu", bias=True, sets=sets)
    product_of(bits, 1, 192, 24, HALF, normed=True, gated=True, activation="silu", residual=True, sets=sets)
    product_of(bits, 1, 330, 9, HALF, residual=True, bias=True, sets=sets)
    product_of(bits, 1, 64, 5, torch.float32, normed=True, sets=sets)
    assert dotted == [True, False, False]  # float32 keeps its digits


def test_inputs_without_size(dotted: list[bool]) -> None:
    """Zeros have no scale, NaN and infinity stay what they are, and large inputs take no bits from others."""
    words, scales = int_weight(4, 4, 16, 96)
    x = torch.zeros(1, 96, dtype=HALF, device=DEVICE)
    words, scales = words.to(DEVICE), scales.to(DEVICE)
    multiply = int_product.bodies["cuda"].function
    assert not multiply(x, words, scales, 16).any()
    x[0, :32], x[0, 32:] = 2e4, torch.linspace(-1, 1, 64, device=DEVICE)
    x[0, :31] = 0.0
    expected = int_product.reference(x.cpu(), words.cpu(), scales.cpu(), 16)
    torch.testing.assert_close(multiply(x, words, scales, 16).cpu(), expected, rtol=1e-2, atol=1e-3)
    for wrong in (float("nan"), float("inf")):
        x[0, 40] = wrong
        assert not multiply(x, words, scales, 16).isfinite().any()


@pytest.mark.parametrize("bits", [8, 4])
def test_shapes_of_dot_products(bits: int) -> None:
    asked = [(28672, 64, False), (14336, 64, True), (6144, 64, False), (4096, 224, False), (4096, 3, False)]
    assert [tuning.int_dot_shape(out, pairs, bits, gated)[:2] for out, pairs, gated in asked] == [
        (True, 8),
        (True, 8),
        (bits == 8, 16),
        (True, 32),
        (True, 4),
    ]


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_row_wherever_it_lies(bits: int, dtype: torch.dtype) -> None:
    """To torch a row is contiguous whatever its distance to the next, of which there is none."""
    words, scales = int_weight(1, bits, 9, 64)
    for x in (
        normal(1, 1, 97, dtype=dtype)[:, :64],
        normal(2, 64, 1, dtype=dtype).t(),
        normal(3, 1, 70, dtype=dtype)[:, 3:67],
    ):
        found = int_product.bodies["cuda"].function(x.to(DEVICE), words.to(DEVICE), scales.to(DEVICE), 9)
        expected = int_product.reference(x, words, scales, 9)
        tolerance = int_product.tolerance[dtype]
        torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


@BITS
@pytest.mark.parametrize("width", [80, 1056])
def test_few_rows_with_all_around_them(bits: int, width: int) -> None:
    product_of(bits, 3, width, 96, torch.float16, gated=True, activation="gelu_tanh", normed=True)
    product_of(bits, 3, width, 96, torch.float16)


def test_one_part_alone_is_written_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "nearest_power_of_2", lambda ratio: 1)
    monkeypatch.setattr(bodies, "finish_splits", None)
    product_of(4, 5, 512, 72, HALF)


@BITS
@pytest.mark.parametrize("gated", [True, False])
def test_many_rows(bits: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is widened in three parts."""
    monkeypatch.setattr(bodies, "DEQUANTIZE_SCRATCH_BYTES", 4 * 200 * 40)
    monkeypatch.setattr(bodies, "_scratch", {})
    product_of(
        bits,
        MAX_INT_TILE_ROWS + 4,
        200,
        96,
        torch.float32,
        gated=gated,
        activation="silu" if gated else None,
        bias=True,
        residual=not gated,
        normed=True,
    )
    product_of(bits, MAX_INT_TILE_ROWS + 4, 200, 96, torch.float32)


@BITS
@pytest.mark.parametrize(("width", "num_out"), [(4096, 3), (8224, 2), (32, 1), (33, 9)])
@pytest.mark.parametrize("gated", [True, False])
def test_one_row(bits: int, width: int, num_out: int, gated: bool) -> None:
    """As many units as a program reads at once, fewer and more; outputs that fill no program."""
    num_out = 2 * num_out if gated else num_out
    product_of(
        bits,
        1,
        width,
        num_out,
        torch.bfloat16,
        gated=gated,
        activation="silu" if gated else None,
        bias=True,
        residual=not gated,
        normed=True,
    )


@BITS
@pytest.mark.parametrize("width", [64, 1056])
def test_one_row_and_several_outputs_a_program(bits: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of inputs, and several."""
    monkeypatch.setattr(int_gemv, "int_gemv_shape", lambda num_units, num_out: (4, 8))
    product_of(bits, 1, width, 26, torch.bfloat16, gated=True, activation="gelu", bias=True, normed=True)
    product_of(bits, 1, width, 13, torch.float32, activation="relu2", residual=True)


def test_shapes_of_one_row() -> None:
    """Several outputs a program where there are enough; whole blocks where there are any."""
    outputs = (4, 512, 1024, 3072, 4096, 128256)
    assert [tuning.int_gemv_shape(32, num_out)[0] for num_out in outputs] == [1, 1, 2, 4, 8, 8]
    assert [tuning.int_gemv_shape(units, 1)[1] for units in (1, 32, 128, 256, 448, 512, 2000)] == [
        1,
        32,
        128,
        256,
        64,
        128,
        128,
    ]


def test_no_rows() -> None:
    product_of(4, 0, 64, 6, torch.bfloat16, gated=True, activation="silu")


@pytest.mark.parametrize("index", range(len(examples_of(int_rows))))
def test_rows_are_exact(index: int) -> None:
    example = example_of(int_rows, index)
    if example["dtype"] == torch.bfloat16 and not ON_GPU:
        pytest.skip("the interpreter cuts bfloat16 off")
    moved = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in example.items()}
    assert same_bits(int_rows.bodies["cuda"].function(**moved).cpu(), int_rows.reference(**example))


@BITS
def test_all_rows_are_exact(bits: int) -> None:
    words, scales = int_weight(3, bits, 70, 208)
    out = torch.empty(70, 208, device=DEVICE)
    dequantize(out, words.to(DEVICE), scales.to(DEVICE))
    assert same_bits(out.cpu(), dequantize_ints(words, scales, 70, 208))


@FILES
@pytest.mark.parametrize("num_rows", [1, 3, MAX_INT_TILE_ROWS + 1])
def test_scales_as_files_have_them(bits: int, sets: int, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of inputs, and several; a pair that is half padding."""
    monkeypatch.setattr(int_gemv, "int_gemv_shape", lambda num_units, num_out: (4, 8))
    product_of(bits, num_rows, 480, 26, HALF, gated=True, activation="gelu", bias=True, normed=True, sets=sets)
    product_of(bits, num_rows, 64, 13, torch.float32, residual=True, sets=sets)


@FILES
def test_all_rows_of_a_file_are_exact(bits: int, sets: int) -> None:
    words, scales = int_weight(3, bits, 70, 208, sets)
    out = torch.empty(70, 208, device=DEVICE)
    dequantize(out, words.to(DEVICE), scales.to(DEVICE))
    assert same_bits(out.cpu(), dequantize_ints(words, scales, 70, 208))
    ids = torch.tensor([69, 0, 33])
    rows = int_rows.bodies["cuda"].function(ids.to(DEVICE), words.to(DEVICE), scales.to(DEVICE), 208, torch.float32)
    assert same_bits(rows.cpu(), out[ids].cpu())


@FILES
def test_each_scale_meets_its_inputs(bits: int, sets: int) -> None:
    """A scale and a minimum of its own for each set: one that is read from another place shows here."""
    codes = torch.full((16, 4, 32), 3)
    number = torch.arange(16 * 2 * sets).view(16, 4, -1).float() + 1
    both = torch.stack([number, number / 8], -1).squeeze(2)
    words, scales = pack_codes(codes, bits), pack_scales(both.half())
    values = (3 - (128 if bits == 8 else 0)) * number + number / 8
    for num_rows in (1, 64):
        x = torch.eye(128, dtype=torch.float16)[32 : 32 + num_rows].contiguous()
        found = int_product.bodies["cuda"].function(x.to(DEVICE), words.to(DEVICE), scales.to(DEVICE), 16)
        meant = values.repeat_interleave(64 // sets, dim=2).flatten(1).T[32 : 32 + num_rows]
        torch.testing.assert_close(found.float().cpu(), meant, rtol=2e-3, atol=0)


@BITS
def test_every_code_at_every_place(bits: int) -> None:
    """Packed and unpacked again, widened by the kernel, and multiplied: a wrong shift or mask shows here."""
    codes = ((torch.arange(64)[None, :] + torch.arange(256)[:, None]) % (1 << bits)).view(256, 2, 32)
    words = pack_codes(codes, bits)
    assert words.dtype == torch.int32 and torch.equal(unpack_codes(words), codes.int())
    scales = torch.ones(256, 2, dtype=torch.float16)
    if bits == 4:
        scales = torch.stack([scales, torch.zeros_like(scales)], -1)
    packed = pack_scales(scales)
    values = codes.view(256, 64).float() - (128 if bits == 8 else 0)
    out = torch.empty(256, 64, device=DEVICE)
    dequantize(out, words.to(DEVICE), packed.to(DEVICE))
    assert torch.equal(out.cpu(), values)
    for num_rows in (1, 64):
        x = torch.eye(64, dtype=HALF)[:num_rows].contiguous()
        found = int_product.bodies["cuda"].function(x.to(DEVICE), words.to(DEVICE), packed.to(DEVICE), 256)
        assert torch.equal(found.float().cpu(), values.T[:num_rows])


@BITS
def test_the_order_of_codes(bits: int) -> None:
    """Field f of half h of a span is its input 16 f + h; outputs lie in panels of eight, groups in pairs."""
    for output, group, half, f in ((0, 0, 0, 0), (9, 3, 5, 1), (17, 1, 15, 1), (7, 2, 4, 0)):
        codes = torch.zeros(18, 4, 32, dtype=torch.int64)
        codes[output, group, 16 * f + half] = 5
        words = pack_codes(codes, bits)
        assert words.shape == (3, 2, 8, 2 * bits) and words.count_nonzero() == 1 and words.is_contiguous()
        span, field = (8 * (group % 2), f) if bits == 8 else (0, f + 2 * (group % 2))
        word = int(words[output // 8, group // 2, output % 8, span + half // 2]) & 0xFFFFFFFF
        assert word == 5 << 16 * (half % 2) + bits * field


def test_scales_lie_as_codes_do() -> None:
    plain = torch.arange(10 * 3).view(10, 3).half()
    packed = pack_scales(plain)
    assert packed.shape == (2, 2, 8, 2) and packed[1, 0, 1].tolist() == [27, 28] and packed[1, 1, 1].tolist() == [29, 0]
    both = pack_scales(torch.stack([plain, -plain], -1))
    assert both.shape == (2, 2, 2, 8, 2) and both[1, 0, 1, 1].tolist() == [28, -28] and not both[1, 1, 1].any()


@pytest.mark.parametrize(("bits", "sets"), [(8, 0), (4, 2), (8, 2), (4, 4)])
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows_of_experts_are_not_sorted(bits: int, sets: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for each pair, which reads its own matrix; a pair of none is 0."""
    words, scales = int_weight(bits, bits, 12 * 24, 200, sets or None)
    x = normal(1, 2, 200, dtype=HALF)
    ids = torch.tensor([[3, 11], [-1, 0]], dtype=torch.int32)
    epilogue = Epilogue(normal(2, 12 * 24), "silu" if gated else None, gated)
    expected = grouped_int_product.reference(x, words, scales, ids, 12, epilogue)
    monkeypatch.setattr(grouped_ints, "sort_pairs", None)
    for limit in (tuning.MAX_GATED_GEMV_WIDTH, 100):  # gates and ups at once, and one after the other
        monkeypatch.setattr(grouped_ints, "MAX_GATED_GEMV_WIDTH", limit)
        given = [move(value, DEVICE) for value in (x, words, scales, ids, 12, epilogue)]
        found = grouped_int_product.bodies["cuda"].function(*given)
        torch.testing.assert_close(found.float().cpu(), expected.float(), rtol=4e-3, atol=4e-3)
    assert not found[1, 0].any() and found[1, 1].any()
