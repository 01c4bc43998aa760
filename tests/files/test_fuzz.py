"""Two thousand mutated checkpoints: each is refused with our error or runs a step. `fuzz.py` has the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COUNT = 2_000


def fuzz(*options: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), "--json", "--workers", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (1 if summary["failures"] else 0)
    return summary


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count, seed", [(COUNT, 1), pytest.param(500_000, 2, marks=pytest.mark.slow)])
def test_no_file_does_harm(count: int, seed: int) -> None:
    summary = fuzz("--count", str(count), "--seed", str(seed))
    assert summary["failures"] == []
    assert summary["accepted"] + summary["refused"] == summary["count"] == count
    assert summary["accepted"] >= count // 5 and summary["refused"] >= count // 2
    assert summary["structural"] >= count * 8 // 10
    assert len(summary["by_seed"]) == 39
    for name, outcomes in summary["by_seed"].items():
        share = 20 if name.startswith("quantized") else 10  # which have more parts to damage
        assert min(outcomes.get("accepted", 0), outcomes.get("refused", 0)) >= sum(outcomes.values()) // share, name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_harm_is_noticed() -> None:
    """Planted: an exception of another type, memory without end, a crash and a hang; the files between go on."""
    summary = fuzz("--count", "8", "--timeout", "5", "--planted", ",error,memory,,crash,,hang")
    found = {failure["index"]: (failure["outcome"], failure["reason"]) for failure in summary["failures"]}
    outcomes = {index: outcome for index, (outcome, _) in found.items()}
    assert outcomes == {1: "failed", 2: "failed", 4: "crash", 6: "hang"}
    assert "KeyError" in found[1][1] and "MemoryError" in found[2][1] and "Fatal Python error: Aborted" in found[4][1]
    assert summary.get("accepted", 0) + summary.get("refused", 0) == 4
