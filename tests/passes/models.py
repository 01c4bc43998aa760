"""Tiny models with random weights, with any rules applied, and the ops that a step calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.models import load, reading
from penstock.models.decoder import Decoder
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.ops import OpTable
from penstock.passes.lower import RULES, Lower, Rule
from tests.models.paged import Paged

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [200], [3, 1, 4]]


def describe(architecture: str, variant: int = 0, **changes: Any) -> dict[str, Any]:
    like = FAMILIES[architecture].like[variant]
    return {"architectures": [architecture], **like, "initializer_range": 0.15, **changes}


def make(
    config: dict[str, Any],
    rules: Sequence[Rule],
    monkeypatch: pytest.MonkeyPatch,
    device: str = "cpu",
    exact: bool = False,
    **options: Any,
) -> Decoder:
    """Load random weights, those of norms too, on the CPU, with the bodies and `rules` of a device."""
    usual = reading.from_seed

    def vary(*given: Any) -> reading.Take:
        take = usual(*given)

        def taken(name: str) -> torch.Tensor:
            found = take(name)
            return found if found.ndim > 1 else found + torch.linspace(-0.3, 0.3, len(found))

        return taken

    ops = OpTable(device, exact)
    with monkeypatch.context() as patch:
        patch.setattr(reading, "from_seed", vary)
        finish = Lower(ops, options.get("quantization") == "fp8", rules)
        made = load.load_model(None, spec_from_config(config), dummy_seed=3, finish=finish, **options)
    assert isinstance(made, Decoder)
    return made


def without(name: str) -> list[Rule]:
    return [rule for rule in RULES if rule.name != name]


def only(name: str) -> list[Rule]:
    return [rule for rule in RULES if rule.name == name]


@contextmanager
def trace(with_tensors: bool = False) -> Iterator[list[str]]:
    """Fill the list with the ops that models call, and how many tensors each is given."""
    called: list[str] = []
    find = OpTable.__getattr__

    def note(table: OpTable, name: str) -> Callable[..., torch.Tensor]:
        found = find(table, name)

        def call(*args: Any, **options: Any) -> torch.Tensor:
            given = sum(isinstance(value, torch.Tensor) for value in args)
            called.append(f"{name} {given}" if with_tensors else name)
            return found(*args, **options)

        return call

    OpTable.__getattr__ = note  # type: ignore[method-assign]
    try:
        yield called
    finally:
        OpTable.__getattr__ = find  # type: ignore[method-assign]


def answer(model: Decoder, prompts: Sequence[Sequence[int]] = PROMPTS, num_new: int = 3) -> torch.Tensor:
    """The logits of every position, prompts cut into chunks at random; the last tokens' also by `ends`."""
    rows = Paged(model, num_blocks=64).run(prompts, num_new, chunk=6)
    return torch.stack([logits for row in rows for logits in row.logits])
