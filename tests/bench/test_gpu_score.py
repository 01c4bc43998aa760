"""Scoring with transformers and the divergence of quantized weights, on a tiny model on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_case import Case, Settings
from bench.gpu_divergence import divergence
from bench.gpu_score import distance, oracle
from bench.gpu_sets import SHAPES
from penstock.models.spec import FAMILIES, spec_from_config
from tests.bench.test_gpu import OPTIONS, TINY

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **FAMILIES["Qwen3ForCausalLM"].like[0],
    "vocab_size": 100_000,
    "hidden_size": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "rope_theta": 70_000.0,
}


@pytest.mark.parametrize("config", [{**TINY, "model_type": "llama"}, QWEN], ids=["llama", "qwen3"])
def test_sequences_of_the_timed_runs_are_scored(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rope, another order of rows or an untied head would show at once."""
    monkeypatch.setitem(SHAPES, "tiny", config)
    monkeypatch.setattr("bench.gpu_case.WARM_SETS", ())
    monkeypatch.setattr(
        "bench.gpu_case.requests",
        lambda kind, seed: [([(7 * i * seed + j * j) % 90_000 for j in range(20 + i)], 12 + i) for i in range(3)],
    )
    Case("tiny", Settings(OPTIONS, ["bs1", "bs32"], {}, counters=False, score=5)).measure()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["kind"] == "score" and found["shape"] == "tiny"
    assert found["timed"]["mean"] < 1e-4 and found["decoded"]["mean"] < 1e-4
    assert found["timed"]["tokens"] == 12 + 12 + 13 + 13 + 14 and found["decoded"]["tokens"] == 5 * 64
    assert "timed_to_float32" not in found


def test_a_parameter_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    spec = spec_from_config({**QWEN, "num_hidden_layers": 1}, 64)
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.k_norm"):
        oracle(str(tmp_path), spec, torch.float32, torch.device("cpu"))


def test_distances() -> None:
    assert distance([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]]) == {"mean": 0.5, "max": 1.0, "tokens": 3}


def test_quantizing_diverges_a_little(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": 500, "hidden_size": 64}))
    sizes = {"num_sequences": 3, "length": 40, "singles": 6}
    same = divergence(str(tmp_path), None, None, "float32", "cpu", **sizes)
    assert all(part["kl_mean"] < 1e-6 and part["top1_same"] == 1 for part in same.values())
    assert [part["positions"] for part in same.values()] == [3 * 34, 3 * 6, 6]
    eight, four = (divergence(str(tmp_path), kind, None, "float32", "cpu", **sizes) for kind in ("int8", "int4"))
    for way in ("prompt", "together", "alone"):
        assert 1e-6 < eight[way]["kl_mean"] < four[way]["kl_mean"] < 1
    kept = divergence(str(tmp_path), None, "int8", "float32", "cpu", **sizes)
    assert 0 < kept["prompt"]["kl_mean"] < eight["prompt"]["kl_mean"]
