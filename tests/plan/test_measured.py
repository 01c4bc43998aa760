"""The plan's memory against an engine process that has run the load. `python -m bench.plan` compares speeds too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bench.plan import read_resident_bytes
from penstock.api.plan.devices import here
from penstock.api.plan.fit import Subject, find_fit
from penstock.config import EngineConfig
from penstock.hub import resolve_model
from penstock.models.files import open_checkpoint
from tests.server.running import RunningServer

NUM, PROMPT, OUTPUT, CONTEXT = 4, 240, 16, 1024


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_an_engine_takes_the_memory_that_was_forecast(name: str) -> None:
    """Within a twentieth: weights, cache, steps and the process together."""
    checkpoint = open_checkpoint(resolve_model(name, progress=False))
    try:
        config = EngineConfig(max_model_len=CONTEXT)
        fit = find_fit(Subject(checkpoint.config, checkpoint), config, here(False), PROMPT + OUTPUT, NUM)
    finally:
        checkpoint.close()
    flags = ["--kv-cache-tokens", str(fit.memory.needed_tokens), "--max-model-len", str(CONTEXT)]
    with RunningServer(name, *flags) as running, ThreadPoolExecutor(NUM) as pool:

        def complete(number: int) -> int:
            prompt = [1000 + (number * 7919 + at * 104729) % 40000 for at in range(PROMPT)]
            body = {"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0}
            return httpx.post(f"{running.url}/v1/completions", json=body, timeout=120).status_code

        assert list(pool.map(complete, range(NUM))) == [200] * NUM
        assert fit.memory.total == pytest.approx(read_resident_bytes(Path(f"/proc/{running.engine_pid()}")), rel=0.05)
