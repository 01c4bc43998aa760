"""Which of the library's kernels is taken, without the library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import test_triton  # noqa: F401  before Triton is imported
from tests.ops.examples import normal

pytest.importorskip("triton")

from penstock.ops.triton import tuning  # noqa: E402
from penstock.ops.triton.matmul import cublas  # noqa: E402


class Product:
    """Results that tell who made them."""

    def __init__(self, can: bool = True, names: bool = True) -> None:
        self.can, self.names = can, names

    def list_algorithms(self) -> list[str]:
        if not self.names:
            raise RuntimeError("cublasLtMatmulAlgoGetHeuristic failed with status 15")
        return ["first", "kernel"]

    def run(self, kernel: str, x: Tensor, weight: Tensor, out: Tensor) -> bool:
        assert kernel == "kernel"
        out.fill_(7.0)
        return self.can


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    monkeypatch.setattr(cublas, "_can_choose", lambda x, weight: True)
    monkeypatch.setattr(cublas, "_library", lambda: "found")
    monkeypatch.setattr(cublas, "_read", lambda algorithm, attribute: cublas.TILE if algorithm == "kernel" else 1)
    cublas.find_algorithm.cache_clear()
    return normal(1, 12, 32), normal(2, 48, 32)


def _given(product: Product, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that the library is asked about."""

    def made(size: cublas.GemmSize) -> Product:
        asked.append(size.num_rows)
        return product

    asked: list[int] = []
    monkeypatch.setattr(cublas, "_matmul", made)
    return asked


def test_the_named_kernel_is_taken(pair: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _given(Product(), monkeypatch)
    for _ in range(2):
        assert torch.equal(cublas.gemm(*pair), torch.full((12, 48), 7.0))
    assert asked == [tuning.CHOSEN_ROWS_STEP, 12, 12]  # for a kernel once, rounded up


@pytest.mark.parametrize("product", [Product(can=False), Product(names=False)])
def test_what_the_library_cannot_torch_does(
    product: Product, pair: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _given(product, monkeypatch)
    assert torch.equal(cublas.gemm(*pair), torch.mm(pair[0], pair[1].t()))


def test_without_the_library_torch_does_it(pair: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_library", lambda: None)
    assert torch.equal(cublas.gemm(*pair), torch.mm(pair[0], pair[1].t()))


def test_those_that_split_or_are_slow_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sizes that are asked for, the product's own comes first."""
    listed = {40: ["slow", "good"], 48: ["splits", "better"], 56: []}
    told = {"slow": (41, 1), "splits": (66, 2), "good": (66, 1), "better": (66, 0)}

    def make(size: cublas.GemmSize) -> SimpleNamespace:
        return SimpleNamespace(list_algorithms=lambda can_split: [] if can_split else listed[size.num_rows])

    monkeypatch.setattr(cublas, "_library", lambda: "found")
    monkeypatch.setattr(cublas, "_matmul", make)
    monkeypatch.setattr(cublas, "_read", lambda algorithm, attribute: told[algorithm][attribute // 2])
    size = cublas.GemmSize(40, 64, 64, torch.bfloat16, torch.device("cpu"))
    assert list(cublas.list_unsplit(size)) == ["good", "better"]
    monkeypatch.setattr(cublas, "_library", lambda: None)
    assert list(cublas.list_unsplit(size)) == []


def _on_gpu(rows: int, **other: Any) -> Any:
    """What is asked of a tensor there."""
    known = {
        "shape": (rows, 16),
        "is_cuda": True,
        "dtype": torch.bfloat16,
        "is_contiguous": lambda: True,
        "data_ptr": lambda: 64,
        "numel": lambda: tuning.MIN_CHOSEN_MACS // tuning.MIN_CHOSEN_ROWS,
    }
    return SimpleNamespace(**known | other)


def test_what_suits_on_a_gpu() -> None:
    many, weight = tuning.MIN_CHOSEN_ROWS, _on_gpu(8)
    assert cublas._can_choose(_on_gpu(many), weight) and cublas._can_choose(_on_gpu(many + 1), weight)
    apart: list[tuple[Any, Any]] = [
        (_on_gpu(many - 1), weight),
        (_on_gpu(many), _on_gpu(8, numel=lambda: tuning.MIN_CHOSEN_MACS // many - 1)),
        (_on_gpu(many, dtype=torch.float16), weight),
        (_on_gpu(many, dtype=torch.float32), _on_gpu(8, dtype=torch.float32)),
        (_on_gpu(many, is_contiguous=lambda: False), weight),
        (_on_gpu(many), _on_gpu(8, data_ptr=lambda: 72)),
    ]
    assert not any(cublas._can_choose(*pair) for pair in apart)


def test_what_suits() -> None:
    """Without a GPU nothing does, and the product is torch's."""
    x, weight = torch.zeros(tuning.MIN_CHOSEN_ROWS, 16, dtype=torch.bfloat16), torch.zeros(8, 16, dtype=torch.bfloat16)
    assert not cublas._can_choose(x, weight)
    assert cublas._library() is None or torch.version.cuda is not None
