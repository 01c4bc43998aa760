"""The picture of drafting methods, from the file that is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.drafters import KINDS, METHODS, main
from bench.process import ROOT

KEPT = ROOT / "bench" / "results" / "drafters-2026-11-18.json"


def test_every_method_was_measured_on_every_kind() -> None:
    cases = json.loads(KEPT.read_text())["cases"]
    assert sorted((case["method"], case["kind"]) for case in cases) == sorted((m, k) for m in METHODS for k in KINDS)
    for case in cases:
        assert (
            0 <= case["num_accepted_tokens"] <= case["num_draft_tokens"] and case["num_tokens"] > case["num_steps"] / 2
        )


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["--draw", str(KEPT), str(tmp_path / "one.svg")]) == 0
    text = (tmp_path / "one.svg").read_text()
    assert all(word in text for word in (*METHODS, *KINDS, "tokens per step"))
