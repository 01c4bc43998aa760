"""The picture of a GPU's results, from the files that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_plot import cases, main, starts
from bench.process import ROOT

KEPT = ROOT / "bench" / "results" / "gpu-2026-11-16.json"


def line(kind: str, **more: Any) -> dict[str, Any]:
    return {"engine": "penstock", "shape": "llama-3.1-8b", "kind": kind, **more}


def test_later_files_hold_and_other_options_are_left_out() -> None:
    first = {
        "cases": [
            line("bs1", out_tok_s=1.0),
            line("start", ready_s=9.0, triton_cache="cold"),
            line("start", ready_s=5.0, triton_cache="warm"),
        ]
    }
    second = {
        "cases": [
            line("bs1", out_tok_s=2.0),
            line("bs1", out_tok_s=3.0, deterministic=True),
            line("bs1", out_tok_s=4.0, quantization="fp8"),
            line("score", timed={}),
        ]
    }
    assert cases([first, second]) == {("llama-3.1-8b", "bf16"): {"bs1": 2.0}, ("llama-3.1-8b", "fp8"): {"bs1": 4.0}}
    assert starts([first, second]) == {("llama-3.1-8b", "bf16"): 9.0}


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    extra = json.loads(KEPT.read_text())
    extra["cases"] = [line("nano", out_tok_s=14500.0, quantization="fp8"), line("start", ready_s=12.0)]
    (tmp_path / "extra.json").write_text(json.dumps(extra))
    assert main([str(KEPT), str(tmp_path / "extra.json"), str(tmp_path / "one.svg")]) == 0
    text = (tmp_path / "one.svg").read_text()
    for words in (
        "Llama 3.1 8B, bf16",
        "Llama 3.1 8B, fp8",
        "Qwen3 0.6B, bf16",
        "NVIDIA H200",
        "target, at least",
        "14,500",
    ):
        assert words in text, words


def test_what_is_no_picture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(KEPT), str(tmp_path / "two.json")])
    assert "must end in .svg or .png" in capsys.readouterr().err
