"""Every kernel compiles for the GPUs that are supported, whether or not there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

KERNELS = (
    "_activation",
    "_add",
    "_choose",
    "_common",
    "_encoder",
    "_ended",
    "_exact",
    "_few",
    "_gemv",
    "_in_order",
    "_inputs",
    "_int_finished",
    "_int_row",
    "_int_rows",
    "_int_tile",
    "_joined",
    "_layer_norm",
    "_made_and_used",
    "_parts",
    "_pieces",
    "_pooling",
    "_product",
    "_report",
    "_rms_norm",
    "_rope",
    "_scale",
    "_single",
    "_softcap",
    "_store",
    "_tile",
    "_told",
    "_write",
    "cut",
    "cut_sums",
)
FP8_KERNELS = ("_finished", "_rounded")  # not for Ampere


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(
    ("capability", "variants"),
    [(90, "once"), *(pytest.param(capability, "all", marks=pytest.mark.slow) for capability in (80, 89, 90))],
)
def test_kernels_compile(capability: int, variants: str, tmp_path: Path) -> None:
    """Ampere, Ada and Hopper; the interpreter accepts much that a compiler does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.compile_kernels", str(capability), variants]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert told.returncode == 0, told.stderr[-3000:]
    assert set(told.stdout.split()) == {*KERNELS, *(FP8_KERNELS if capability >= 89 else ())}
