from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.errors import InvalidConfig
from penstock.ops import OPS, OpTable, op
from penstock.ops.registry import REFERENCE_ONLY
from tests.ops.examples import examples_of


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def test_every_op_has_examples() -> None:
    assert [name for name, op in OPS.items() if not examples_of(op)] == []


def test_an_op_without_examples_is_named(registry: None) -> None:
    @op(tolerance={torch.float32: 0.0})
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(AssertionError, match="double has no examples"):
        test_every_op_has_examples()


def test_the_body_of_the_device_is_called(registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    @op(tolerance={torch.float32: 0.0})
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

        @op(tolerance={})
        def linear(x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="linear has an exact cpu body already"):
        OPS["linear"].impl("cpu", exact=True)


@pytest.mark.parametrize("exact_first", [True, False])
def test_exact_bodies_alone_are_taken_where_asked(registry: None, exact_first: bool) -> None:
    @op(tolerance={torch.float32: 0.0})
    def quadruple(x: Tensor) -> Tensor:
        return 4 * x

    exact = OpTable("cpu", exact=True)
    with pytest.raises(InvalidConfig, match="op quadruple has no deterministic cpu kernel"):
        exact.quadruple(torch.ones(1))
    for is_exact in (exact_first, not exact_first):
        quadruple.impl("cpu", exact=is_exact)(partial(torch.add, 40 if is_exact else 4))
    with pytest.raises(ValueError, match="quadruple has a fast cpu body already"):
        quadruple.impl("cpu", exact=False)
    assert exact.quadruple(torch.ones(1)).item() == 41
    assert OpTable("cpu").quadruple(torch.ones(1)).item() == quadruple(torch.ones(1)).item() == 5


def test_a_rowwise_reference_is_exact(registry: None) -> None:
    @op(tolerance={torch.float32: 0.0}, rowwise=True)
    def halve(x: Tensor) -> Tensor:
        return x / 2

    assert OpTable("cpu", exact=True).halve(torch.ones(1)).item() == 0.5


def test_a_table_names_an_op_that_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match="there is no op 'frobnicate'"):
        OpTable("cpu").frobnicate(torch.ones(1))
