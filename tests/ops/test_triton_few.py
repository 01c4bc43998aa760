"""Products of a few rows, whose matrices are larger than those of an op's examples."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.product import is_skinny, product
from tests.ops.examples import normal
from tests.ops.test_triton import DEVICE  # before Triton is imported

pytest.importorskip("triton")

from penstock.ops.triton.matmul.skinny import skinny_gemm  # noqa: E402


@pytest.mark.parametrize(
    ("num_rows", "width", "num_out", "eps", "activation"),
    [(2, 100, 70, 1e-5, None), (17, 256, 64, 0.0, "silu"), (32, 130, 200, 1e-5, "relu2")],
)
def test_as_the_reference(num_rows: int, width: int, num_out: int, eps: float, activation: str | None) -> None:
    """Breaks if a row's factor, an output's bias or what lies beyond the last of either is another's."""
    x = normal(1, num_rows, width, dtype=torch.float16).to(DEVICE)
    weight = normal(2, num_out, width, scale=width**-0.5, dtype=torch.float16).to(DEVICE)
    bias, residual = normal(3, num_out).to(DEVICE), normal(4, num_rows, num_out, dtype=torch.float16).to(DEVICE)
    expected = product.reference(x, weight, Epilogue(bias, activation, False, residual), None, eps)
    found = skinny_gemm(x, weight, Epilogue(bias, activation, False, residual.clone()), eps)
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(
        skinny_gemm(x, weight, Epilogue(None, activation, False, None), eps),
        product.reference(x, weight, Epilogue(None, activation, False, None), None, eps),
        atol=4e-3,
        rtol=4e-3,
    )


@pytest.mark.parametrize(
    ("num_rows", "width", "num_out", "eps"), [(2, 100, 140, 1e-5), (32, 256, 64, 0.0), (9, 64, 2, 0.0)]
)
def test_gates_as_the_reference(num_rows: int, width: int, num_out: int, eps: float) -> None:
    """Breaks if a gate meets another one's values; the last program has fewer than it could take."""
    x = normal(1, num_rows, width, dtype=torch.float16).to(DEVICE)
    weight = normal(2, num_out, width, scale=width**-0.5, dtype=torch.float16).to(DEVICE)
    bias, residual = normal(3, num_out).to(DEVICE), normal(4, num_rows, num_out // 2, dtype=torch.float16).to(DEVICE)
    expected = product.reference(x, weight, Epilogue(bias, "silu", True, residual), None, eps)
    found = skinny_gemm(x, weight, Epilogue(bias, "silu", True, residual.clone()), eps)
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(
        skinny_gemm(x, weight, Epilogue(None, "silu", True, None), eps),
        product.reference(x, weight, Epilogue(None, "silu", True, None), None, eps),
        atol=4e-3,
        rtol=4e-3,
    )


def test_rows_of_a_wider_tensor() -> None:
    x = normal(1, 5, 96, dtype=torch.float16).to(DEVICE)[:, :64]
    weight = normal(2, 30, 64, scale=0.1, dtype=torch.float16).to(DEVICE)
    torch.testing.assert_close(
        skinny_gemm(x, weight, Epilogue(), 0.0), product.reference(x, weight), atol=4e-3, rtol=4e-3
    )


def test_which_products_are_of_few_rows() -> None:
    x, weight = torch.zeros(32, 64, dtype=torch.bfloat16), torch.zeros(4096, 64, dtype=torch.bfloat16)
    assert is_skinny(x, weight, None) and not is_skinny(x, weight, torch.ones(64))
    assert not is_skinny(x[:1], weight, None) and not is_skinny(x.float(), weight.float(), None)
    assert not is_skinny(x.repeat(2, 1), weight, None) and not is_skinny(x, weight[:1024], None)
