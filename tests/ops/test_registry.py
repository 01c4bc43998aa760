from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.errors import InvalidConfig
from penstock.ops import OPS, op, take_exact
from penstock.ops.registry import REFERENCE_ONLY, Example


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def _examples() -> Iterator[Example]:
    yield {"x": torch.ones(2)}


def test_a_body_without_examples_is_refused(registry: None) -> None:
    @op(tolerance={torch.float32: 0.0})
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="double has no examples"):
        double.impl("cpu", exact=True)


def test_the_body_of_the_device_is_called(registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    @op(tolerance={torch.float32: 0.0}, examples=_examples)
    def triple(x: Tensor, factor: float = 3.0) -> Tensor:
        return factor * x

    @triple.impl("cpu", exact=True)
    def _(x: Tensor, factor: float = 3.0) -> Tensor:
        return -factor * x

    assert OPS["triple"] is triple
    assert triple(torch.ones(1)).item() == -3 and triple(x=torch.ones(1), factor=4).item() == -4
    assert triple.reference(torch.ones(1)).item() == 3
    assert triple(torch.ones(1, device="meta")).device.type == "meta"
    monkeypatch.setattr("penstock.ops.registry.REFERENCE_ONLY", REFERENCE_ONLY | {"cpu"})
    assert triple(torch.ones(1)).item() == 3


def test_names_and_bodies_are_registered_once(registry: None) -> None:
    with pytest.raises(ValueError, match="linear is registered already"):

        @op(tolerance={}, examples=_examples)
        def linear(x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="linear has an exact cpu body already"):
        OPS["linear"].impl("cpu", exact=True)


@pytest.mark.parametrize("exact_first", [True, False])
def test_exact_bodies_alone_are_taken_where_asked(registry: None, exact_first: bool) -> None:
    @op(tolerance={torch.float32: 0.0}, examples=_examples)
    def quadruple(x: Tensor) -> Tensor:
        return 4 * x

    take_exact(True)
    try:
        with pytest.raises(InvalidConfig, match="takes quadruple, of which cpu has no exact body"):
            quadruple(torch.ones(1))
        for exact in (exact_first, not exact_first):
            quadruple.impl("cpu", exact=exact)(partial(torch.add, 40 if exact else 4))
        with pytest.raises(ValueError, match="quadruple has a fast cpu body already"):
            quadruple.impl("cpu", exact=False)
        assert quadruple(torch.ones(1)).item() == 41
    finally:
        take_exact(False)
    assert quadruple(torch.ones(1)).item() == 5


def test_a_rowwise_reference_is_exact(registry: None) -> None:
    @op(tolerance={torch.float32: 0.0}, examples=_examples, rowwise=True)
    def halve(x: Tensor) -> Tensor:
        return x / 2

    take_exact(True)
    try:
        assert halve(torch.ones(1)).item() == 0.5
    finally:
        take_exact(False)
