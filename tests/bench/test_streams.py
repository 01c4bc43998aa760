"""The measurement of the API process: its counting engine, and one small run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.streams.latency import STATIONS
from bench.streams.worker import CountingEngine
from penstock.types import Request, SamplingParams
from tests.llm import tiny


def test_each_step_adds_one_token_to_every_request_until_its_end() -> None:
    engine = CountingEngine()
    for id, num_tokens in (("a", 2), ("b", 3)):
        engine.add(Request(id=id, tokens=(1,), sampling=SamplingParams(), max_tokens=num_tokens))
    steps = []
    while engine.has_work:
        steps.append([(delta.request_id, len(delta.tokens), delta.finish_reason) for delta in engine.step()])
    assert steps == [[("a", 1, None), ("b", 1, None)], [("a", 1, "length"), ("b", 1, None)], [("b", 1, "length")]]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_small_run_gives_its_figures(tmp_path: Path) -> None:
    tiny.write_config(tmp_path, vocab_size=320)
    tiny.write_tokenizer(tmp_path)
    command = [sys.executable, "-m", "bench.streams", "--model", str(tmp_path)]

    def run(*more: str) -> list[str]:
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        return done.stdout.splitlines()

    burst = ["--streams", "4", "--output-tokens", "8", "--step-ms", "5", "--repetitions", "1", "--api", "completions"]
    (line,) = run(*burst)
    figures = json.loads(line)
    assert figures["events_per_token"] == 1.0 and figures["ms_per_request"] > 0
    lines = run("--latency", "3")
    assert [one[:16].strip() for one in lines] == ["station", *STATIONS, "all"]
