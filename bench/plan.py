"""Compare the plan with measured runs on this CPU: `python -m bench.plan [MODEL …]`.

For each model and load, rounds of a forecast and a measured run alternate, so that what else the machine does weighs on
both. A run is a server of its own; memory is what its engine process has resident after the load. With --cpu-time one
thread computes, and its CPU seconds are compared in place of wall time: for a machine that others use too. Printed is
forecast by measured; speeds are ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.quiet import busy_share
from bench.stalls.server import ServerUnderTest

MODELS = ("smollm2", "gemma3-270m")
OUTPUT, CONTEXT = 64, 1024
PLAN = "import sys; from penstock.cli import main; sys.exit(main())"
COUNT_CPU = "import time; time.perf_counter = time.process_time; "
NAMES = {
    "memory": "memory",
    "prefill": "prefill_tokens_per_s",
    "decode alone": "decode_tokens_per_s_alone",
    "whole load": "output_tokens_per_s",
}


@dataclass(frozen=True)
class Load:
    model: str
    concurrency: int
    num_prompt: int
    counts_cpu: bool

    @property
    def flags(self) -> list[str]:
        return ["--threads=1"] if self.counts_cpu else []

    def plan(self) -> dict[str, Any]:
        wish = {"concurrency": self.concurrency, "prompt-tokens": self.num_prompt, "output-tokens": OUTPUT}
        flags = [f"--{name}={value}" for name, value in {**wish, "context": CONTEXT}.items()]
        code = COUNT_CPU * self.counts_cpu + PLAN
        command = [sys.executable, "-c", code, "plan", self.model, *flags, *self.flags, "--json"]
        return dict(json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout))

    def prompt(self, number: int) -> list[int]:
        """Prompts differ from their first token on, and hardly repeat: no cache and no draft helps."""
        return [1000 + (number * 7919 + at * 104729) % 40000 for at in range(self.num_prompt)]


def measure(load: Load, cache_tokens: int) -> dict[str, float]:
    """Run a load on a server that has room for it."""
    options = {"kv-cache-tokens": cache_tokens, "max-model-len": CONTEXT, "speculative-config": "off"}
    flags = [f"--{name}={value}" for name, value in options.items()]
    with ServerUnderTest(load.model, [*flags, *load.flags]) as server, httpx.Client(timeout=600) as client:
        process = Path(f"/proc/{client.get(f'{server.url}/info').json()['models'][0]['pid']}")

        def complete(number: int, num_output: int = OUTPUT) -> None:
            body = {"prompt": load.prompt(number), "max_tokens": num_output, "ignore_eos": True, "temperature": 0}
            client.post(f"{server.url}/v1/completions", json=body).raise_for_status()

        def time_all(begin: int, count: int, num_output: int) -> float:
            """Return the seconds of so many requests at once."""
            before = read_seconds(process, load.counts_cpu)
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(lambda number: complete(number, num_output), range(begin, begin + count)))
            return read_seconds(process, load.counts_cpu) - before

        time_all(0, load.concurrency, OUTPUT)  # shapes are recorded
        prefill_s = median(time_all(1000 + number, 1, 1) for number in range(4))
        alone_s = median(time_all(2000 + number, 1, OUTPUT) for number in range(3))
        all_s = time_all(3000, load.concurrency, OUTPUT)
        return {
            "memory": float(read_resident_bytes(process)),
            "prefill": load.num_prompt / prefill_s,
            "decode alone": (OUTPUT - 1) / (alone_s - prefill_s),
            "whole load": load.concurrency * OUTPUT / all_s,
        }


def read_seconds(process: Path, counts_cpu: bool) -> float:
    if not counts_cpu:
        return time.perf_counter()
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_resident_bytes(process: Path) -> int:
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def compare(load: Load, rounds: int) -> dict[str, float]:
    """Return forecast by measured."""
    plans, runs = [], []
    for _ in range(rounds):
        plans.append(load.plan())
        runs.append(measure(load, plans[-1]["kv_cache_tokens"]["needed"]))
    forecast = {name: median(plan["speed"][key] for plan in plans) for name, key in NAMES.items() if name != "memory"}
    forecast["memory"] = float(plans[0]["memory_bytes"]["total"])
    return {name: forecast[name] / median(run[name] for run in runs) for name in NAMES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: smollm2 gemma3-270m")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    asked = parser.parse_args()
    share = busy_share()
    print(f"others use {'an unknown share' if share is None else f'{100 * share:.0f} %'} of the cores", file=sys.stderr)
    print(f"{'model':16}{'at once':>8}" + "".join(f"{name:>14}" for name in NAMES))
    for model in asked.models or MODELS:
        for concurrency in asked.concurrency:
            found = compare(Load(model, concurrency, asked.prompt_tokens, asked.cpu_time), asked.rounds)
            print(f"{model:16}{concurrency:8}" + "".join(f"{found[name]:14.2f}" for name in NAMES), flush=True)


if __name__ == "__main__":
    main()
