from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.ops import OPS, op
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

    with pytest.raises(ValueError, match="linear has a cpu body already"):
        OPS["linear"].impl("cpu", exact=False)
