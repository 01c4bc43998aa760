"""8-bit floats on a GPU: a cache of them, rows rounded to them, and what surrounds their products."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

import penstock.ops.triton.bodies  # noqa: E402, F401  registers the bodies
from penstock.ops.attention.attention import Shared, Work, attention  # noqa: E402
from penstock.ops.attention.cache import FP8, cast_to_cache  # noqa: E402
from penstock.ops.attention.cache_write import cache_write  # noqa: E402
from penstock.ops.attention.qkv_write import qkv_write  # noqa: E402
from penstock.ops.matmul.epilogue import Epilogue  # noqa: E402
from penstock.ops.matmul.fp8_mlp import fp8_mlp  # noqa: E402
from penstock.ops.matmul.fp8_product import fp8_group_product, fp8_product, quantize_fp8  # noqa: E402
from penstock.ops.triton.matmul.fp8_product import CODE_SCALE, apply_fp8_epilogue, quantize_gated, quantize_rows  # noqa: E402
from tests.ops.examples import integers, normal, permutation  # noqa: E402
from tests.ops.examples.attention import cache_pool, paged  # noqa: E402
from tests.ops.examples.case import move, with_epilogue  # noqa: E402
from tests.ops.examples.matmul import fp8_groups  # noqa: E402

if ON_GPU and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("the GPU has no 8-bit floats", allow_module_level=True)

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
rounds = pytest.mark.skipif(not ON_GPU, reason="the interpreter rounds 8-bit floats its own way")


def on_device(example: dict[str, Any]) -> dict[str, Any]:
    """On the device, keys beside each other as a GPU's cache has them."""
    moved = {name: move(value, DEVICE) for name, value in example.items()}
    if "k_cache" in moved:
        moved["k_cache"] = moved["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    return moved


def near(found: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    tolerance = times * TOLERANCE[dtype]
    torch.testing.assert_close(
        found.float().cpu(), expected.float().cpu(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_stored_within_range(dtype: torch.dtype) -> None:
    """Finite ones beyond it as the largest; what is none stays damaged."""
    given = torch.tensor([0.0, 1.0, -448.0, 500.0, -60000.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    expected = torch.tensor([0.0, 1.0, -448.0, 448.0, -448.0, *[torch.nan] * 3])
    torch.testing.assert_close(cast_to_cache(given, FP8).float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes(dtype: torch.dtype) -> None:
    """Whole numbers up to 16 are 8-bit floats; others are clamped."""
    size, num_heads, num_kv_heads, tokens = 24, 4, 2, 5
    qkv = integers(1, 33, tokens * (num_heads + 2 * num_kv_heads) * size).float() - 16
    qkv = qkv.view(tokens, -1).to(dtype)
    qkv[0, num_heads * size : num_heads * size + 3] = torch.tensor([1000.0, -2000.0, 448.0])
    qkv[1, -3:] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    example: dict[str, Any] = {
        "qkv": qkv,
        **cache_pool(3, num_kv_heads, 4, size, FP8),
        "slots": permutation(2, 12)[:tokens],
        "positions": torch.arange(tokens),
    }
    given = on_device(example)
    assert torch.equal(qkv_write.bodies["cuda"].function(**given).cpu(), qkv_write.reference(**example))
    assert example["k_cache"].float().abs().max() == 448 and example["v_cache"].float().isnan().sum() == 3
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(given[name].float().cpu(), example[name].float(), rtol=0, atol=0, equal_nan=True)


@rounds
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """As torch does it, for many values of many sizes."""
    v = (normal(1, 64, 2 * 128) * torch.logspace(-4, 3, 64)[:, None]).to(dtype)
    example: dict[str, Any] = {
        "qkv": torch.cat((torch.zeros(64, 128), v.float()), 1).to(dtype),
        **cache_pool(4, 1, 16, 128, FP8),
        "slots": torch.arange(64),
        "positions": torch.zeros(64, dtype=torch.int64),
    }
    given = on_device(example)
    qkv_write.bodies["cuda"].function(**given)
    qkv_write.reference(**example)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name].cpu().view(torch.uint8), example[name].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extra", [{}, {"window": 33}, {"softcap": 20.0}, {"alibi": torch.linspace(0.01, 0.5, 6)}])
def test_attention(dtype: torch.dtype, extra: dict[str, Any]) -> None:
    """Single queries in parts and tiles in one step, one of nobody's among them."""
    example = paged(3, [(1, 130), (1, 1), (1, 64), (7, 7), (40, 90)], 6, 2, 24, dtype=FP8, **extra)
    example["q"] = example["q"].to(dtype)
    expected = attention.reference(**example)
    given = on_device(example)
    given["lengths"][1] = 0
    tiles = torch.tensor([(3, 0), (4, 0)], dtype=torch.int32, device=DEVICE)
    found = attention.bodies["cuda"].function(**given, work=Work(3, tiles, 2))
    used = [t for t in range(len(expected)) if t != 1]
    near(found[used], expected[used], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_common_positions(dtype: torch.dtype) -> None:
    example = paged(5, [(1, length) for length in (100, 70, 40, 90)], 6, 2, 64, dtype=FP8)
    example["q"] = example["q"].to(dtype)
    example["table"][3, :4] = example["table"][0, :4]
    expected = attention.reference(**example)
    members, skips, tiles = (
        torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for values in ([0, 3, 0, 0], [64, 0, 0, 64], [[0, 2, 0, 64], [0, 0, 0, 0]])
    )
    work = Work(4, None, 2, Shared(members, skips, tiles, 2))
    found = attention.bodies["cuda"].function(**on_device(example), work=work)
    near(found, expected, dtype)


def test_large_queries_stay_finite() -> None:
    """They meet an 8-bit cache as float16."""
    example = paged(6, [(1, 40), (3, 40)], 2, 1, 16, dtype=FP8)
    example["q"] = torch.full_like(example["q"], 1e5).bfloat16()
    example["scale"] = 1e-5
    found = attention.bodies["cuda"].function(**on_device(example), work=None)
    assert found.isfinite().all()


def multiplied(codes: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """What the library's product gives."""
    return (codes.float() @ weight.float().to(codes.device).T * CODE_SCALE**2).to(dtype)


@rounds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 4096, 14336])
@pytest.mark.parametrize("normed", [False, True])
def test_rows_are_rounded(dtype: torch.dtype, width: int, normed: bool) -> None:
    """Nearly all codes are the reference's, and no row depends on another: a few lie between two."""
    x, norm = normal(1, 5, width, dtype=dtype), normal(2, width)
    y = x.float()
    if normed:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * norm
    expected, scales = quantize_fp8(y)
    given = x.to(DEVICE)
    norm = norm.to(DEVICE)
    codes, found = quantize_rows(given, norm if normed else None, 1e-5 if normed else 0.0)
    torch.testing.assert_close(found.cpu(), scales, rtol=1e-5, atol=0)
    assert (codes.cpu().view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.99
    alone, _ = quantize_rows(given[3:4], norm if normed else None, 1e-5 if normed else 0.0)
    assert torch.equal(alone.view(torch.uint8)[0], codes.view(torch.uint8)[3])


def test_a_row_of_zeros_and_damaged_rows() -> None:
    """Zeros stay zeros; NaN and infinities leave nothing finite in their own row, whatever it is multiplied with."""
    x = torch.ones(5, 64)
    x[1], x[2, 7], x[3, 9], x[4, 63] = 0.0, torch.nan, torch.inf, -torch.inf
    codes, scales = quantize_rows(x.bfloat16().to(DEVICE), None, 0.0)
    values = (codes.float() * scales[:, None]).cpu()
    torch.testing.assert_close(values[:2], x[:2])
    weight, scale = quantize_fp8(torch.ones(16, 64))
    for last in (True, False):
        sums = multiplied(codes, weight, torch.bfloat16)
        if last:
            y = apply_fp8_epilogue(sums, scales, scale.to(DEVICE), Epilogue())
        else:
            new, new_scales = quantize_gated(sums, scales, scale.to(DEVICE), Epilogue(None, "silu", True))
            y = new.float() * new_scales[:, None]
        assert y[:2].isfinite().all() and not y[2:].isfinite().any(), last


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_are_exact(dtype: torch.dtype) -> None:
    """Rows whose largest value is 448 times a power of two: codes are the values themselves, through both products."""
    codes = 2.0 ** integers(1, 9, 3 * 32).float().view(3, 32)
    codes[:, 5] = 448.0
    found, scales = quantize_rows((codes / 64).to(dtype).to(DEVICE), None, 0.0)
    assert torch.equal(found.float().cpu(), codes) and scales.tolist() == pytest.approx([1 / 64] * 3)
    gate_up = torch.zeros(2 * 32, 32)
    gate_up[:32], gate_up[32:] = torch.eye(32), torch.eye(32) / 4
    found, scales = quantize_gated(
        multiplied(found, gate_up, torch.float32), scales, torch.ones(64, device=DEVICE), Epilogue(None, "relu", True)
    )
    values = found.float() * scales[:, None]
    assert values[:, 5].tolist() == pytest.approx([448.0 / 64 * 448 / 256] * 3)


def test_a_residual_with_gaps_is_read_by_its_strides() -> None:
    sums, scale = multiplied(torch.ones(3, 16), torch.ones(32, 16), torch.float32).to(DEVICE), torch.ones(32)
    wide = normal(1, 3, 64).to(DEVICE)
    found = apply_fp8_epilogue(sums, torch.ones(3, device=DEVICE), scale.to(DEVICE), Epilogue(residual=wide[:, ::2]))
    torch.testing.assert_close(found, wide[:, ::2] + 16)


@rounds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(4))
def test_products(dtype: torch.dtype, index: int) -> None:
    """The library's own, with what surrounds it."""
    gated, normed = bool(index % 2), index > 1
    x, (weight, scale) = normal(1, 5, 64, dtype=dtype), quantize_fp8(normal(2, 96, 64, scale=0.125))
    example: dict[str, Any] = {
        "x": x,
        "weight": weight,
        "scale": scale,
        "bias": normal(5, 96) if normed else None,
        "residual": None if gated else normal(4, 5, 96, dtype=dtype),
        "activation": "silu" if gated else None,
        "gated": gated,
        "norm": normal(3, 64) if normed else None,
        "eps": 1e-5 if normed else 0.0,
    }
    example = with_epilogue(example)
    near(fp8_product.bodies["cuda"].function(**on_device(example)), fp8_product.reference(**example), torch.bfloat16)


@rounds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 300])
def test_a_gated_mlp(dtype: torch.dtype, num_rows: int) -> None:
    """As wide as a layer of an 8B model is deep; codes between two may fall either way."""
    width, hidden = 256, 14336
    gate_up, gate_up_scale = quantize_fp8(normal(1, 2 * hidden, width, scale=width**-0.5))
    down, down_scale = quantize_fp8(normal(2, width, hidden, scale=hidden**-0.5))
    example: dict[str, Any] = {
        "x": normal(3, num_rows, width, dtype=dtype),
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "down": down,
        "down_scale": down_scale,
        "gate": Epilogue(None, "silu", True),
        "epilogue": Epilogue(residual=normal(4, num_rows, width, dtype=dtype)),
        "eps": 1e-5,
    }
    expected = fp8_mlp.reference(**example)
    near(fp8_mlp.bodies["cuda"].function(**on_device(example)), expected, torch.bfloat16, times=2)


@rounds
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_sums_are_within_range(dtype: torch.dtype) -> None:
    """Every code the largest there is: in float16 their sums would be infinite."""
    x, (weight, scale) = torch.ones(4, 4096, dtype=dtype, device=DEVICE), quantize_fp8(torch.ones(32, 4096))
    found = fp8_product.bodies["cuda"].function(x, weight.to(DEVICE), scale.to(DEVICE))
    near(found, torch.full((4, 32), 4096.0), torch.bfloat16, times=0.1)


def test_the_reference_writes_what_it_reads() -> None:
    """Values that 8-bit floats have come back from the cache as they were."""
    k, v = (integers(seed, 17, 6 * 2 * 8).float().view(6, 2, 8) - 8 for seed in (1, 2))
    caches = cache_pool(2, 2, 4, 8, FP8)
    cache_write.reference(k, v, slots=torch.arange(6), **caches)
    table, ends = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    length, q = torch.tensor([6], dtype=torch.int32), normal(3, 1, 4, 8)
    expected = cache_pool(2, 2, 4, 8, torch.float32)
    cache_write.reference(k, v, slots=torch.arange(6), **expected)
    results = [
        attention.reference(q, pool["k_cache"], pool["v_cache"], table, ends, length, 1.0)
        for pool in (caches, expected)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("group", [128, 32, 96])
@pytest.mark.parametrize("gated", [True, False])
def test_one_row_by_weights_in_groups(gated: bool, group: int) -> None:
    """Inputs in several parts, the last of them short; groups that are no power of two take another kernel."""
    codes, scale = fp8_groups(1, 32, 4224, group)
    given = with_epilogue(
        {
            "x": normal(2, 1, 4224, dtype=torch.float16),
            "weight": codes,
            "scale": scale,
            "group": group,
            "bias": normal(3, 32),
            "residual": None if gated else normal(4, 1, 32, dtype=torch.float16),
            "activation": "silu" if gated else None,
            "gated": gated,
            "norm": normal(5, 4224),
            "eps": 1e-5,
        }
    )
    expected = fp8_group_product.reference(**given)
    found = fp8_group_product.bodies["cuda"].function(**on_device(given))
    torch.testing.assert_close(found.float().cpu(), expected.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_rows", [3, 70, 140, 520])
def test_rows_by_weights_in_groups(num_rows: int) -> None:
    """A tile in splits, one of more rows, two, and a widened matrix."""
    codes, scale = fp8_groups(1, 80, 1072, 64)
    given: dict[str, Any] = {
        "x": normal(2, num_rows, 1072, dtype=torch.float16),
        "weight": codes,
        "scale": scale,
        "group": 64,
    }
    expected = fp8_group_product.reference(**given)
    found = fp8_group_product.bodies["cuda"].function(**on_device(given))
    torch.testing.assert_close(found.float().cpu(), expected.float(), rtol=4e-3, atol=4e-3)
