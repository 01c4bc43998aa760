"""Measure what the API process costs per streamed token and adds to a first token: `python -m bench.streams`.

Streams of 1 token a step come from an engine process that only counts, so nothing but the API process works. Reported
are its CPU time per request and per further token (all threads), and the rate; with `--latency` the milliseconds
between a lone request and its first token. Give every build the same `--step-ms`: a process that falls behind sends
several tokens at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.load.loop import send_due
from bench.load.stream import read_sample
from bench.load.wire import Target
from bench.stalls.server import ServerUnderTest
from bench.streams.latency import measure_stations

TIMEOUT_S = 300.0
APIS = ("completions", "chat")
SERVER = "bench.streams.server"
FEW_TOKENS = 2  # the first begins a stream, the last ends it


def make_body(api: str, index: int, num_prompt: int, num_output: int) -> dict[str, Any]:
    shared = {"max_tokens": num_output, "stream": True, "stream_options": {"include_usage": True}}
    if api == "chat":
        return {"messages": [{"role": "user", "content": f"Count from {index} on."}], "ignore_eos": True, **shared}
    return {"prompt": [1000 + (index * 17 + at) % 20000 for at in range(num_prompt)], "ignore_eos": True, **shared}


def make_request(target: Target, api: str, body: dict[str, Any]) -> bytes:
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    return target.request("POST", path, json.dumps(body).encode())


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measure(server: ServerUnderTest, api: str, given: argparse.Namespace) -> dict[str, float]:
    """Send a burst of one token each and a whole one; the difference is what tokens cost."""
    short = send_burst(server, api, given, FEW_TOKENS)
    whole = send_burst(server, api, given, given.output_tokens)
    num_tokens = given.streams * (given.output_tokens - FEW_TOKENS)
    return {
        "us_per_token": 1e6 * (whole["cpu_s"] - short["cpu_s"]) / num_tokens,
        "ms_per_request": 1e3 * short["cpu_s"] / given.streams,
        "tokens_per_s": given.streams * given.output_tokens / whole["seconds"],
        "events_per_token": whole["num_events"] / given.streams / given.output_tokens,
    }


def send_burst(server: ServerUnderTest, api: str, given: argparse.Namespace, num_output: int) -> dict[str, float]:
    target = Target.parse(server.url)
    requests = [
        make_request(target, api, make_body(api, index, given.prompt_tokens, num_output))
        for index in range(given.streams)
    ]
    begin, before = time.perf_counter(), cpu_s(server.pid)
    exchanges = asyncio.run(send_due(target, requests, [0.0] * len(requests), begin, TIMEOUT_S))
    spent, seconds = cpu_s(server.pid) - before, time.perf_counter() - begin
    samples = [read_sample(exchange, at, begin, num_output) for at, exchange in enumerate(exchanges)]
    failed = [sample.error for sample in samples if sample.outcome != "ok"]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(samples)} streams failed: {failed[0]}")
    return {"cpu_s": spent, "seconds": seconds, "num_events": sum(len(sample.gaps_s) + 1 for sample in samples)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="its tokenizer is used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=25.0, help="0: the engine waits for nothing")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--api", action="append", choices=APIS, help="default: both")
    parser.add_argument("--latency", type=int, metavar="N", help="the stations of N lone requests instead")
    given = parser.parse_args()
    os.environ["STREAMS_STEP_MS"] = str(given.step_ms if given.latency is None else 0.0)
    if given.latency is not None:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["STREAMS_TRACE"] = path = str(Path(folder, "stations"))
            with ServerUnderTest(given.model, module=SERVER) as server:
                target = Target.parse(server.url)
                request = make_request(target, "completions", make_body("completions", 0, given.prompt_tokens, 8))
                print(f"{'station':<16} {'median':>8} {'tenth':>8} ms")
                for station, middle, fast in measure_stations(target, request, Path(path), given.latency):
                    print(f"{station:<16} {middle:8.3f} {fast:8.3f}", flush=True)
        return
    with ServerUnderTest(given.model, module=SERVER) as server:
        for api in given.api or APIS:
            send_burst(server, api, given, FEW_TOKENS)
            rows = [measure(server, api, given) for _ in range(given.repetitions)]
            row = {name: median(one[name] for one in rows) for name in rows[0]}
            print(json.dumps({"api": api, **{name: round(value, 2) for name, value in row.items()}}), flush=True)


if __name__ == "__main__":
    main()
