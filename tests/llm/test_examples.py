"""Every script in examples/ runs, here on tiny models."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(name: str, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_all_are_run_here() -> None:
    run_here = {"chat.py", "batch.py", "streaming.py", "embeddings.py", "train_eagle3.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == run_here


def test_chat(run: Any, checkpoint: tuple[str, Any]) -> None:
    lines = run("chat.py", "the cat?", "--model", checkpoint[0], "--max-tokens", "6")
    cached, prompt = (int(word) for word in lines[-1].strip("(").split() if word.isdigit())
    assert 16 <= cached < prompt


def test_batch(run: Any, checkpoint: tuple[str, Any]) -> None:
    lines = run("batch.py", "--model", checkpoint[0], "--max-tokens", "5")
    assert [line for line in lines if line.startswith("The capital")] == ["The capital of France is"]
    assert sum("(length, -" in line or "(stop, -" in line for line in lines) == 6
    assert re.fullmatch(r"\d+ tokens in \d+ steps, [3-6] rows at most", lines[-1])


def test_streaming(run: Any, checkpoint: tuple[str, Any]) -> None:
    lines = run("streaming.py", "--model", checkpoint[0], "--max-tokens", "9")
    parts = {name: [line for line in lines if line.startswith(f"{name}: ")] for name in ("story", "list")}
    assert len(parts["list"]) == 4 < len(parts["story"]) <= 9
    assert sum(" in full: " in line for line in lines) == 2


def test_embeddings(run: Any, encoder: str) -> None:
    lines = run("embeddings.py", "--model", encoder)
    scores = [float(line.split()[0]) for line in lines]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True) and all(-1.01 < score < 1.01 for score in scores)


def test_train_eagle3(run: Any, checkpoint: tuple[str, Any], tmp_path: Path) -> None:
    small = ("--num-answers", "3", "--max-tokens", "8", "--train-seconds", "0.3", "--vocab", "64")
    lines = run("train_eagle3.py", "--model", checkpoint[0], "--folder", str(tmp_path / "head"), *small)
    assert re.fullmatch(r"other questions: [\d.]+% of \d+ draft tokens accepted", lines[-2])
    assert re.fullmatch(r"\d+ tokens/s without, \d+ with the head: [\d.]+ times", lines[-1])
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"config.json", "model.safetensors"}
