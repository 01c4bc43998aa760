"""The picture of ops by themselves, from the file that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.ops_plot import lines_of, main
from bench.process import ROOT

KEPT = ROOT / "bench" / "results" / "ops-2026-11-16.json"


def test_each_case_has_its_place() -> None:
    cases = [
        {"op": op, "shape": "8b", "case": case, "share_of_floor": share}
        for op, case, share in [
            ("product", "qkv 6144×4096, 1 rows", 0.9),
            ("sample", "1 × 500", 0.1),
            ("product", "qkv 6144×4096, 32 rows", 0.7),
            ("attention", "1 rows at 512", 0.2),
            ("int_product", "4 bits, out 4096×4096, 8 rows", 0.3),
            ("attention", "8 × 1024 after 0", 0.4),
        ]
    ]
    assert lines_of(cases) == {
        ("8b", "product"): {"qkv": {1: 0.9, 32: 0.7}},
        ("8b", "4 bits"): {"out": {8: 0.3}},
        ("8b", "attention"): {"1 sequence": {512: 0.2}},
    }


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([str(KEPT), str(tmp_path / "one.svg")]) == 0
    text = (tmp_path / "one.svg").read_text()
    for words in ("NVIDIA H200", "Llama 3.1 8B: products, bfloat16", "Qwen3 0.6B: 4-bit integers", "256 sequences"):
        assert words in text, words


def test_what_is_no_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "other.json").write_text('{"device": "x", "copy_tb_s": 4, "bf16_tflop_s": 800, "cases": []}')
    (tmp_path / "short.json").write_text('{"device": "x"}')
    for name, why in (
        ("other.json", "no products and no attention"),
        ("none.json", "No such file"),
        ("short.json", "it has no copy_tb_s, bf16_tflop_s, cases"),
    ):
        assert main([str(tmp_path / name), str(tmp_path / "one.svg")]) == 1
        told = capsys.readouterr().err
        assert f"{name} is no result of bench.ops: " in told and why in told
    with pytest.raises(SystemExit):
        main([str(KEPT), str(tmp_path / "one.txt")])
