"""An engine that has nothing to do uses no processor: its threads sleep, they do not spin or poll."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from penstock.ops import cpu

SCRIPT = """
import asyncio, json, sys, time
from penstock import LLM, AsyncLLM, SamplingParams
from penstock.ops import cpu

options = dict(load_format="dummy", skip_tokenizer_init=True, threads=3)
params = SamplingParams(max_tokens=8)

async def answer(llm):
    return [delta async for delta in llm.generate([1, 2, 3] * 40, params)]

if sys.argv[2] == "LLM":
    llm = LLM(sys.argv[1], progress=False, **options)
    answered = llm.generate([1, 2, 3] * 40, params, use_tqdm=False)
else:
    llm = AsyncLLM(sys.argv[1], **options)
    answered = asyncio.run(answer(llm))
before = time.process_time()       # of all threads
time.sleep(2)
idle_s = time.process_time() - before
llm.close()
print(json.dumps([bool(answered), cpu.num_threads(), before, idle_s]))
"""


@pytest.mark.skipif(cpu.path() == "reference", reason="no kernels, so no threads of theirs")
@pytest.mark.parametrize("interface", ["LLM", pytest.param("AsyncLLM", marks=pytest.mark.slow)])
def test_an_idle_engine_sleeps(config_folder: str, interface: str) -> None:
    """A worker that kept spinning would take 2 s, one that looked every millisecond about 20 ms."""
    command = [sys.executable, "-c", SCRIPT, config_folder, interface]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answered, num_threads, busy_s, idle_s = json.loads(done.stdout)
    print(f"\n{interface}: {1000 * idle_s:.2f} ms of processor time in 2 s, after {busy_s:.1f} s at work")
    assert answered and num_threads == 3 and busy_s > 0.1
    assert idle_s < 0.02
