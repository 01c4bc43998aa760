"""Rows as the runner makes them at admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.sampling import RowState
from penstock.types import BeamSearchParams, Request, SamplingParams

PROMPT = (1, 2, 3)


def _make_row(
    *, prompt: Sequence[int] = PROMPT, generated: Sequence[int] = (), sibling: int = 0, seed: int = 7,
    eos: Sequence[int] = (), bad_words: Sequence[Sequence[int]] = (), beam: BeamSearchParams | None = None,
    **sampling: Any,
) -> RowState:
    request = Request(
        id="r", tokens=tuple(prompt), sampling=SamplingParams(**sampling), seed=seed, eos_token_ids=tuple(eos),
        bad_words=tuple(tuple(word) for word in bad_words), beam=beam,
    )
    return RowState(request, sibling, [*prompt, *generated], len(prompt))


@pytest.fixture(scope="session")
def make_row() -> Callable[..., RowState]:
    return _make_row
