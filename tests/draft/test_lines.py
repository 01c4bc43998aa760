"""Which drafter a row's next step verifies: the model's own, or that of a text, which is there already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.draft.acceptance import Acceptance
from penstock.draft.drafters import MAX_ROW_JUDGED
from penstock.engine.plan import Draft, Output, Row, RowResult
from penstock.runner.cpu.draft_lines import LineMaker, NetRow
from tests.draft.test_drafters import row


def begins(text: float, worth: float, price: float = 0.0, *, is_right: bool | None = None) -> bool:
    """True if the model drafts for a row whose text drafted four tokens of chance `text`, where its lines so far were
    worth `worth` tokens; `is_right`: the model's tokens of this row were right, or wrong."""
    runner: Any = SimpleNamespace(rows=SimpleNamespace(drafters=SimpleNamespace(acceptance=Acceptance())), sampler=None)
    lines = LineMaker(runner, "draft_model", None, 100)
    lines.mean_worth, own = worth, NetRow()
    for _ in range(32 if is_right is not None else 0):
        own.share.add(bool(is_right), MAX_ROW_JUDGED)
    device: Any = SimpleNamespace(state=row([1, 2, 3], [4]), drafts=object())
    result = RowResult((4,), draft=tuple(Draft(9, i - 1, text, "ngram") for i in range(4)))
    return lines.begin(Row(0, 2, 1, Output.SAMPLE), device, own, result, 4, price) is not None


def test_the_line_that_promises_more_is_verified() -> None:
    assert begins(0.3, 2.0) and not begins(0.9, 2.0)


@pytest.mark.parametrize("price", [0.0, 1.0])
def test_the_model_s_time_counts(price: float) -> None:
    """0.94 tokens at once are worth less than 1.5, but more than 1.5 that cost a token's time."""
    assert begins(0.5, 1.5, price) is (price == 0)


def test_a_row_s_own_acceptance_counts() -> None:
    """Breaks when the model drafts in place of a text for a row whose every token it gets wrong."""
    assert begins(0.5, 2.0, is_right=True) and not begins(0.5, 2.0, is_right=False)


def test_a_text_does_not_win_unheard() -> None:
    """Breaks when lines are worth nothing until one is drawn: the model would never draft beside a text."""
    runner: Any = SimpleNamespace(rows=SimpleNamespace(drafters=SimpleNamespace(acceptance=Acceptance())), sampler=None)
    assert begins(0.3, LineMaker(runner, "draft_model", None, 100).mean_worth)
