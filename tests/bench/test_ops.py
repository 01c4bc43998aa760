"""The ops' benchmark without a GPU: every case's call computes on a CPU, its bytes and operations are counted."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from bench import ops as bench_ops  # noqa: E402
from bench.op_cases import SHAPES, Maker  # noqa: E402
from bench.op_inputs import OpCase, Shape, Sizes  # noqa: E402
from penstock.ops import registry  # noqa: E402

TINY = Shape("tiny", 64, 96, 4, 2, 16, 500, normed=True)
SMALL = Sizes((1, 5), (1, 3), (1, 4), (16, 40), (2, 3), (16, 33), ((2, 70, 0), (1, 5, 30)), (6, 32, 7))
MEASURED = {"copy_tb_s": 4.0, "bf16_tflop_s": 800.0, "fp8_tflop_s": 1300.0}


def made(op: str) -> list[OpCase]:
    return list(getattr(Maker(TINY, "cpu", 4000, 4, SMALL), op)())


@pytest.mark.parametrize("op", bench_ops.OPS)
def test_every_call_computes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REFERENCE_ONLY", {"cpu"})
    for case in made(op):
        assert case.num_bytes > 0 and case.calls
        for call in case.calls[:2]:
            result: Any = call()
            assert result.isfinite().all() and len(result), case.name


def test_attention_is_counted() -> None:
    cases = {case.name: case for case in made("attention")}
    one = cases["4 rows at 40"]
    assert one.num_bytes == 4 * 40 * (2 * 2 * 16 * 2) + 4 * 4 * 4 * 16 and one.num_ops == 4 * 4 * 16 * 4 * 40
    chunk = cases["1 × 5 after 30"]
    assert chunk.num_ops == 4 * 4 * 16 * sum(range(31, 36)) and not chunk.others
    together, alone = cases["6 rows, 32 common + 7"], cases["6 rows, 32 common + 7, each alone"]
    assert together.num_bytes == alone.num_bytes - 5 * 32 * 128 and together.num_ops == alone.num_ops


def test_shared_and_unshared_attention_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are: what the flags say is read once is the same for all."""
    monkeypatch.setattr(registry, "REFERENCE_ONLY", {"cpu"})
    torch.manual_seed(0)
    case = made("attention")[-1]
    assert case.name == "6 rows, 32 common + 7"
    arguments: Any = case.calls[0]
    table, work = arguments.args[3], arguments.keywords["work"]
    assert (table[:, :2] == table[0, :2]).all() and len(set(table[:, 2].tolist())) == 6
    assert work.shared.skips.tolist() == [32] * 6 and work.shared.tiles[0].tolist() == [0, 6, 0, 32]


def test_products_are_those_of_the_models() -> None:
    assert SHAPES["8b"].matrices() == {
        "qkv": (6144, 4096),
        "out": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    }
    assert SHAPES["0.6b"].matrices()["qkv"] == (4096, 1024)
    case = next(case for case in made("product") if case.name == "down 64×96, 3 rows")
    assert case.num_bytes == 2 * (64 * 96 + 3 * 160) and case.num_ops == 2 * 3 * 64 * 96


def test_integers_are_counted_with_their_scales() -> None:
    cases = {case.name: case for case in made("int_product")}
    assert cases["8 bits, down 64×96, 3 rows"].num_bytes == 64 * 96 + 64 * 3 * 2 + 2 * 3 * 160
    assert cases["4 bits, down 64×96, 3 rows"].num_bytes == 64 * 48 + 64 * 3 * 4 + 2 * 3 * 160
    assert "8 bits, head 500×64, 1 rows" in cases and "4 bits, head 500×64, 1 rows" not in cases


def test_queries_made_where_they_are_used_are_those_made_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REFERENCE_ONLY", {"cpu"})
    for case in made("qkv_attention"):
        joined, apart = (calls[0]() for calls in (case.calls, case.others["apart"]))
        assert isinstance(joined, torch.Tensor) and isinstance(apart, torch.Tensor)
        torch.testing.assert_close(joined, apart)


def test_figures_stand_beside_their_ceilings() -> None:
    case = OpCase("product", "8b", "x", [], 8e9, 400e9, is_fp8=False)
    row = bench_ops.figures(case, 4e-3, {"torch.mm": 5e-3, "other": None}, MEASURED)
    assert (row["tb_s"], row["share_of_copy"], row["tflop_s"], row["share_of_rate"]) == (2.0, 0.5, 100.0, 0.125)
    assert row["share_of_floor"] == 0.5 and row["others_us"] == {"torch.mm": 5000.0, "other": None}
    assert "torch.mm 5000.0 (1.25), other failed" in bench_ops.line(row)
    eight = OpCase("p", "8b", "x", [], 0, 1300e9, is_fp8=True)
    assert bench_ops.figures(eight, 1e-3, {}, MEASURED)["share_of_rate"] == 1


def test_graphs_hold_each_input_and_end_soon() -> None:
    assert bench_ops.num_launches(10, 2e-6) == 1000  # two milliseconds
    assert bench_ops.num_launches(300, 6e-6) == 300
    assert bench_ops.num_launches(4, 10e-3) == 1


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench_ops.main(["--op", "sample"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err
