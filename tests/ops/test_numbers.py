"""Stored formats and elementary functions, value by value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.ops import cpu
from tests.ops.check import same_bits
from tests.ops.examples import integers
from tests.ops.examples.attention import cache_pool


def _every(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_is_widened_exactly(dtype: torch.dtype, path: str) -> None:
    values = _every(dtype)
    rows = ops.embedding(torch.arange(4096), ops.pack_panels(values.view(4096, 16)), 16)
    wanted = values.float().view(4096, 16)
    assert torch.equal(rows.isnan(), wanted.isnan())
    assert same_bits(rows.nan_to_num(7.0), wanted.nan_to_num(7.0))
    product = ops.linear(torch.ones(8, 1), ops.pack_panels(values.view(-1, 1)), values.numel())
    finite = wanted.flatten().isfinite()
    assert torch.equal(product[3, finite], wanted.flatten()[finite])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(dtype: torch.dtype, path: str) -> None:
    exact = _every(dtype).float()
    halfway = (exact[:-1].double() + exact[1:].double()).div(2).float()
    random = integers(1, 2**32, 200_000).to(torch.int32).view(torch.float32)
    x = torch.cat(
        [
            exact,
            halfway,
            torch.nextafter(halfway, exact[:-1]),
            torch.nextafter(halfway, exact[1:]),
            random,
            random.clamp(-1e-4, 1e-4) * 1e-3,
        ]
    )
    x = x[: x.numel() // 16 * 16].view(-1, 1, 16)
    caches = cache_pool(x.shape[0], 1, 1, 16, dtype)
    ops.cache_write(x, -x, **caches, slots=torch.arange(x.shape[0]))
    for cache, values in (("k_cache", x.flatten()), ("v_cache", -x.flatten())):
        got, wanted = caches[cache].flatten(), values.to(dtype)
        if dtype is torch.float16:  # whose range is small: what is too large becomes the largest
            too_large = values.isfinite() & wanted.isinf()
            assert too_large.sum() > 1000
            wanted[too_large] = 65504.0 * values[too_large].sign().half()
        assert torch.equal(got.isnan(), wanted.isnan())
        assert same_bits(got[~got.isnan()], wanted[~got.isnan()])


def _worst_ulp(got: Tensor, wanted: Tensor) -> float:
    spacing = torch.nextafter(wanted.float(), torch.tensor(torch.inf)) - wanted.float()
    return float(((got.double() - wanted).abs() / spacing.double()).max())


def test_functions_are_accurate(path: str) -> None:
    x = torch.cat([torch.linspace(-87, 88, 300_001), torch.linspace(-1, 1, 100_001)]).view(1, -1)
    silu = ops.activation(x, "silu")
    assert _worst_ulp(silu, x.double() * torch.sigmoid(x.double())) < 4
    assert _worst_ulp(ops.softcap(x, 1.0), torch.tanh(x.double())) < 4
    gelu = x.double() * 0.5 * torch.erfc(-x.double() * 0.5**0.5)
    assert (
        _worst_ulp(
            ops.activation(x.clamp(-4, 4), "gelu"),
            x.double().clamp(-4, 4) * 0.5 * torch.erfc(-x.double().clamp(-4, 4) * 0.5**0.5),
        )
        < 24
    )
    torch.testing.assert_close(ops.activation(x, "gelu").double(), gelu, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu"])
def test_special_values(kind: str, path: str) -> None:
    x = torch.tensor([[float("nan"), 0.0, -0.0, 3e38, -3e38, 1e-40, float("inf")]])
    y = ops.activation(x, kind)
    assert y[0, 0].isnan()
    assert y[0, 1:3].eq(0).all() and y[0, 4].abs().eq(0)
    assert y[0, 3] > 1e38 and y[0, 6].isinf() and y[0, 5] >= 0


def test_a_value_is_the_same_at_every_place(path: str) -> None:
    """Vector bodies and scalar remainders of a loop agree bit for bit."""
    x = torch.linspace(-30, 30, 67)
    for function in (
        lambda t: ops.activation(t, "gelu"),
        lambda t: ops.activation(t, "silu"),
        lambda t: ops.softcap(t, 5.0),
    ):
        whole = function(x[None])[0]
        for width in (1, 2, 3, 5, 7, 8, 9, 15, 17):
            pieces = [function(piece[None])[0] for piece in x.split(width)]
            assert same_bits(torch.cat(pieces), whole)


def test_log_softmax_of_a_wide_row_sums_to_one(path: str) -> None:
    x = torch.randn(2, 262_144, generator=torch.Generator().manual_seed(0)) * 3
    y = ops.log_softmax(x)
    assert (y.double().exp().sum(-1) - 1).abs().max() < 1e-6
    torch.testing.assert_close(y.double(), torch.log_softmax(x.double(), -1), rtol=1e-6, atol=1e-6)


def test_float64_is_refused() -> None:
    assert cpu.path() != "reference"
    with pytest.raises(TypeError, match="float32"):
        ops.rms_norm(torch.ones(1, 4, dtype=torch.float64), torch.ones(4), 1e-6)
