"""The store of KV cache blocks: `python -m bench.store restart MODEL`, and `roles` or `servers` in its place.

`restart`: the time to the first token of a prompt in a new process, with a store that has seen it and without, by
turns. `roles`: the time between tokens of running answers while long prompts arrive, with one engine and with two that
have roles, on the same cores, by turns. `servers`: the same with a prefill server and a decode server behind a router,
whose blocks go over TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.server.running import RunningServer

ROLES = ("--role", "prefill", "--role", "decode")
STREAMS, STREAM_TOKENS = 3, 400
LONG_TOKENS, GAP_S, WINDOW_S = 1200, 1.5, 12.0


def first_token(model: str, folder: str, tokens: int) -> dict[str, float]:
    """Measure one process: the time and the CPU seconds to a prompt's first token."""
    from penstock import LLM, SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0)
    prompts = [[random.Random(seed).randrange(100, 40_000) for _ in range(tokens)] for seed in (1, 2)]
    with LLM(model, progress=False, kv_offloading_path=folder) as llm:
        llm.generate([prompts[1][:17]], params, use_tqdm=False)  # the first step of a process is slower
        begin, begin_cpu = time.perf_counter(), time.process_time()
        output = llm.generate([prompts[0]], params, use_tqdm=False)[0]
        cpu_s, whole_s = time.process_time() - begin_cpu, time.perf_counter() - begin
        assert output.metrics is not None
        latency_s = output.metrics.first_token_latency
        return {"ttft_s": latency_s or whole_s, "cpu_s": cpu_s, "cached": output.num_cached_tokens}


def take_medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def measure_restarts(model: str, tokens: int, repeats: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"cold": [], "restored": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for kind in found:
                command = [
                    sys.executable,
                    "-m",
                    "bench.store",
                    "one",
                    model,
                    "--tokens",
                    str(tokens),
                    "--folder",
                    folder,
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[kind].append(json.loads(done.stdout.splitlines()[-1]))
    middle = {
        kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for kind, runs in found.items()
    }
    cold, restored = middle["cold"], middle["restored"]
    return {
        **middle,
        "ttft_ratio": restored["ttft_s"] / cold["ttft_s"],
        "ttft_ratios": [b["ttft_s"] / a["ttft_s"] for a, b in zip(*found.values())],
        "cpu_ratio": restored["cpu_s"] / cold["cpu_s"],
    }


async def stream(client: httpx.AsyncClient, gaps: list[float], end_s: float) -> None:
    """Ask for answers, one after the other, and note the times between their tokens."""
    while time.monotonic() < end_s:
        body = {"prompt": "Once upon a time", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        last = None
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                now = time.monotonic()
                if line.startswith("data: {") and last is not None:
                    gaps.append(now - last)
                last = now if line.startswith("data: {") else last
                if now > end_s:
                    return


async def send_prompts(client: httpx.AsyncClient, rng: random.Random, ttfts: list[float], end_s: float) -> None:
    """Send long prompts at fixed times, whether or not those before have been answered."""

    async def send() -> None:
        begin = time.monotonic()
        prompt = [rng.randrange(100, 40_000) for _ in range(LONG_TOKENS)]
        await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
        ttfts.append(time.monotonic() - begin)

    sent = []
    while time.monotonic() < end_s - GAP_S:
        sent.append(asyncio.ensure_future(send()))
        await asyncio.sleep(GAP_S)
    await asyncio.gather(*sent)


async def load(url: str, seed: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"gaps": [], "whole_s": []}
    end_s = time.monotonic() + WINDOW_S
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        streams = [stream(client, found["gaps"], end_s) for _ in range(STREAMS)]
        await asyncio.gather(*streams, send_prompts(client, random.Random(seed), found["whole_s"], end_s))
    return found


@contextlib.contextmanager
def serve_apart(options: tuple[str, ...], folder: str) -> Iterator[RunningServer]:
    """Run a prefill server and a decode server behind a router, each with half of the cores."""
    key = Path(folder, "router.key")
    key.write_text(secrets.token_hex(16))
    known = ("--router-key-file", str(key))
    half = ("--threads", str(max(1, (os.cpu_count() or 2) // 2)), "--kv-offloading-size", "0.5", *known)
    command = (sys.executable, "-m", "penstock", "route")
    with (
        RunningServer(*options, *half, "--role", "prefill", "--kv-transfer-port", "0") as prefill,
        RunningServer(*options, *half, "--role", "decode") as decode,
        RunningServer(prefill.url, decode.url, *known, "--no-access-log", command=command) as router,
    ):
        while httpx.get(f"{router.url}/health/ready").json()["upstreams_ready"] < 2:
            time.sleep(0.05)
        yield router


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure_roles(model: str, repeats: int, folder: str, is_apart: bool) -> dict[str, Any]:
    options = (model, "--max-model-len", "2048", "--no-access-log")
    store = ("--kv-offloading-path", folder, "--kv-offloading-size", "0.5")
    runs: dict[str, list[dict[str, float]]] = {"one": [], "two": [], "roles": []}
    with (
        RunningServer(*options) as one,
        RunningServer(*options, "-dp", "2") as two,
        serve_apart(options, folder) if is_apart else RunningServer(*options, *ROLES, *store) as roles,
    ):
        for repeat in range(-1, repeats):
            for name, server in (("one", one), ("two", two), ("roles", roles)):
                found = asyncio.run(load(server.url, repeat))
                gaps, whole_s = found["gaps"], found["whole_s"]
                if repeat >= 0:
                    runs[name].append(
                        {
                            "p50_ms": 1e3 * percentile(gaps, 0.5),
                            "p99_ms": 1e3 * percentile(gaps, 0.99),
                            "longest_ms": 1e3 * max(gaps),
                            "tokens": len(gaps),
                            "prompt_s": statistics.median(whole_s),
                        }
                    )
    middle = {
        name: {key: statistics.median(run[key] for run in many) for key in many[0]} for name, many in runs.items()
    }
    ratios = {
        f"p99_ratio_to_{name}": [b["p99_ms"] / a["p99_ms"] for a, b in zip(runs[name], runs["roles"])]
        for name in ("one", "two")
    }
    return {**middle, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__)
    parser.add_argument("what", choices=("restart", "roles", "servers", "one"))
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default="")
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(first_token(given.model, given.folder, given.tokens)))
    elif given.what == "restart":
        print(json.dumps(measure_restarts(given.model, given.tokens, given.repeats), indent=2))
    else:
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            print(json.dumps(measure_roles(given.model, given.repeats, folder, given.what == "servers"), indent=2))


if __name__ == "__main__":
    main()
