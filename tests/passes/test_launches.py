"""With all rules a step calls the kernels that it called before there were rules (commit 92510d7), in their order.

`golden.json.gz` was recorded there, except for what has changed on purpose since: the 12 steps of 600 and 5000 tokens
that Hopper's prompt kernel is taken for, deterministic steps (decision 0034), decode attention over FP8 caches, and two
arguments of CPU kernels (sinks of attention, interleaved rope) that are off in all of them. A line of it is a kernel
with its sizes; see `launches`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden.json.gz"
ROOT = Path(__file__).parents[2]
# Last layers: OPT's post-norm one stops earlier than it did; a parallel block norms all tokens for its FFN.
DIFFERENT = ("FalconForCausalLM.1", "GPTNeoXForCausalLM.0", "OPTForCausalLM.1")
DEFAULT = (
    "cpu/LlamaForCausalLM.0/int8/",
    "cpu/Gemma2ForCausalLM.0/int4/",
    "gpu/LlamaForCausalLM.0/bfloat16/",
    "gpu/Qwen3-0.6B/fp8/",
    "gpu/Qwen3-0.6B/bfloat16,exact/",
    "gpu/Gemma2ForCausalLM.0/bfloat16,kv=fp8/",
)


def compare(*beginnings: str) -> subprocess.CompletedProcess[str]:
    """In a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.passes.launches", "compare", str(GOLDEN), *beginnings]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_kernel_for_kernel() -> None:
    pytest.importorskip("triton")
    done = compare(*DEFAULT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_family_and_scheme() -> None:
    pytest.importorskip("triton")
    done = compare("")
    keys = [line for line in done.stdout.splitlines() if line.startswith(("cpu/", "gpu/"))]
    assert keys and all(key.split("/")[1] in DIFFERENT for key in keys), done.stdout[-6000:] + done.stderr[-2000:]
