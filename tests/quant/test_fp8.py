"""8-bit floats as a scheme, computed by the references."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock import layers
from penstock.models.decoder import Build, linears, store_fp8
from penstock.models.pooling import Pooling
from penstock.models.reading import from_seed
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.ops import OpTable
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.fp8_product import can_store
from penstock.passes.lower import Lower
from penstock.passes.lower.fused import Fp8Mlp
from penstock.passes.lower.stages import Flow
from penstock.quant import fp8
from penstock.quant.dense import Matrix
from penstock.quant.fp8 import Fp8, as_fp8
from penstock.quant.scheme import Scheme
from penstock.runner.cuda.gpu import fp8_bytes, layer_bytes
from tests.ops.examples import normal
from tests.quant.fused import CPU, multiply

LLAMA = {"architectures": ["LlamaForCausalLM"], **FAMILIES["LlamaForCausalLM"].like[0]}


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("normed", [False, True])
def test_products_are_near_the_dense_ones(num_rows: int, normed: bool) -> None:
    weight, bias, x = normal(1, 96, 64, scale=0.125), normal(2, 96), normal(3, num_rows, 64)
    residual, norm = normal(4, num_rows, 96), layers.RmsNorm(CPU, normal(5, 64), 1e-5) if normed else None
    made, dense = Fp8(CPU, weight, bias), Matrix(CPU, weight, bias)
    assert made.num_bytes == 96 * 64 + 4 * 96 + 4 * 96
    torch.testing.assert_close(
        multiply(made, x, residual, norm=norm), multiply(dense, x, residual, norm=norm), rtol=0.1, atol=0.15
    )
    torch.testing.assert_close(
        multiply(made, x, None, "silu", True, norm), multiply(dense, x, None, "silu", True, norm), rtol=0.1, atol=0.3
    )
    assert not torch.equal(made.matmul(x), dense.matmul(x))


def test_values_that_8_bit_floats_have_are_kept() -> None:
    """A row's largest is 448 times a power of two; one row of activations is not rounded at all."""
    weight = 2.0 ** torch.randint(-5, 8, (32, 48), generator=torch.Generator().manual_seed(1))
    weight[:, 7] = 448.0
    made, x = Fp8(CPU, weight / 32), normal(2, 1, 48)
    ids = torch.tensor([3, 0, 31])
    torch.testing.assert_close(made.rows(ids), weight[ids] / 32)
    torch.testing.assert_close(made.matmul(x), x @ weight.T / 32)


def test_no_row_depends_on_another() -> None:
    made, x = Fp8(CPU, normal(1, 32, 64)), normal(2, 6, 64)
    x[4] *= 1000
    torch.testing.assert_close(made.matmul(x)[[1, 5]], made.matmul(x[[1, 5]]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_damaged_rows_stay_damaged(bad: float) -> None:
    made, x = Fp8(CPU, normal(1, 32, 64)), normal(2, 3, 64)
    x[1, 5] = bad
    down = Fp8(CPU, normal(3, 64, 16))
    y = CPU.fp8_mlp(x, made.codes, made.scale, down.codes, down.scale, Epilogue(None, "silu", True))
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_a_large_matrix_is_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(1, 96, 64)
    whole = Fp8(CPU, weight)
    monkeypatch.setattr(fp8, "VALUES", 1000)
    parts = Fp8(CPU, weight)
    assert torch.equal(whole.codes.view(torch.uint8), parts.codes.view(torch.uint8))
    assert torch.equal(whole.scale, parts.scale)


@pytest.mark.parametrize("shape", [(30, 64), (32, 40)])
def test_sizes_that_the_library_cannot_multiply(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        Fp8(CPU, normal(1, *shape))
    matrix = Matrix(CPU, normal(1, *shape))
    assert not can_store(*shape) and as_fp8(matrix) is matrix


class Identity:
    def __call__(self, x: Tensor, step: layers.StepInputs, memory: object) -> Tensor:
        return x

    def linears(self) -> Iterator[tuple[str, layers.Linear]]:
        yield from ()


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_gated_mlp_is_its_two_products(num_rows: int) -> None:
    """In one op, where both are of 8-bit floats."""
    gate_up, down = Fp8(CPU, normal(1, 96, 64, scale=0.125), normal(2, 96)), Fp8(CPU, normal(3, 64, 48), normal(4, 64))
    x, residual, norm = normal(5, num_rows, 64), normal(6, num_rows, 64), layers.RmsNorm(CPU, normal(7, 64), 1e-5)
    mlp = layers.GatedMlp(CPU, layers.Linear(gate_up), layers.Linear(down), "silu")
    first = multiply(gate_up, x, None, "silu", True, norm)
    expected = multiply(down, first, residual)
    block = layers.Block(CPU, Identity(), mlp, norm, norm)
    for is_fp8 in (True, False):
        stages = getattr(Lower(OpTable("cuda"))(block), "stages", ())
        joined = [stage for stage in stages if isinstance(stage, Fp8Mlp)]
        assert len(joined) == is_fp8
        if joined:
            flow = Flow(residual, None, None)  # type: ignore[arg-type]
            flow.y = norm(x)
            replace(joined[0], first=replace(joined[0].first, branch=None))(flow)
            torch.testing.assert_close(flow.x, expected, rtol=1e-3, atol=1e-3)
        mlp.down.scheme = Matrix(CPU, normal(3, 64, 48))


def test_a_layer_at_a_time_is_there_in_both_forms() -> None:
    """The matrices of a layer are let go before the next one is read; head and embedding stay as they are."""
    spec = spec_from_config(LLAMA)
    take, alive, most = from_seed(spec, 0, torch.float32), weakref.WeakSet[Matrix](), 0

    def hold(name: str, bias: Tensor | None) -> Scheme:
        nonlocal most
        made = Matrix(CPU, take(name), bias)
        alive.add(made)
        most = max(most, len(alive))
        return made

    model = Build(spec, CPU, take, hold, finish=store_fp8).model(Pooling())
    found = [linear for _, linear, _ in linears(model)]
    assert len(found) == 4 * spec.num_layers and {type(linear.scheme) for linear in found} == {Fp8}
    outer = 1 if spec.head is None or spec.head.tied else 2
    assert len(alive) == outer and most == 5  # the embedding and a layer
    held = sum(linear.scheme.num_bytes for linear in found)
    shapes = spec.parameters()
    rest = sum(
        2 * torch.Size(shape).numel()
        for name, shape in shapes.items()
        if not name.startswith("layers.") or len(shape) == 1
    )
    assert fp8_bytes(spec) == held + rest
    assert layer_bytes(spec) * spec.num_layers == sum(
        2 * torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith("layers.")
    )
