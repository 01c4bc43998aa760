"""The real scheduler on a device with a scripted clock: Poisson arrivals in, TTFT and TPOT out, in simulated time.

`python -m tests.simulation.latency` prints the table of docs/decisions/0032-prompts-beside-decode-rows.md."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import quantiles

from penstock.cache.group import Group, StateSpec
from penstock.cache.kv import KVCache
from penstock.engine.engine import Engine
from penstock.engine.executor import Answer, Awaited, Ticket
from penstock.engine.plan import Output, Plan, Result, RowResult
from penstock.engine.scheduling.prompt_cap import PromptCap
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.types import Request, SamplingParams

FULL = Group(StateSpec("full", bytes_per_position=1), (0,))
DECODE_S = ((0, 3.8e-3), (8, 3.9e-3), (32, 4.5e-3), (128, 7.5e-3), (256, 10e-3))  # by rows: 8B, bf16, H200
RATES = (10, 20, 28)  # requests a second


@dataclass(frozen=True)
class Device:
    """Costs of steps. With `num_hidden=100` today's scheduler has the latencies that were measured on an H200."""

    token_s: float = 25.8e-6  # of a prompt token
    num_hidden: int = 100  # prompt tokens that the reading of the weights hides
    prompt_step_s: float = 0.0  # that a step with prompts costs more
    noise: float = 0.0  # of each step's cost

    def cost_s(self, num_decode: int, num_prompt: int, rng: random.Random) -> float:
        index = min(bisect_right(DECODE_S, (num_decode, 1.0)), len(DECODE_S) - 1)
        (low, base), (high, top) = DECODE_S[index - 1], DECODE_S[index]
        seconds = base + (top - base) * (num_decode - low) / (high - low)
        if num_prompt:
            seconds += self.prompt_step_s + self.token_s * max(0, num_prompt - self.num_hidden)
        return seconds * (1 + self.noise * rng.random())


@dataclass(frozen=True)
class Load:
    per_s: float
    num_requests: int = 1500
    num_prompt: int = 1024
    num_output: int = 256
    num_skipped: int = 50  # while the load builds up
    seed: int = 0

    def draw_arrivals(self) -> list[float]:
        rng, now, times = random.Random(self.seed), 0.0, []
        for _ in range(self.num_requests):
            now += rng.expovariate(self.per_s)
            times.append(now)
        return times


@dataclass
class Latency:
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    steps: list[tuple[int, int, float]] = field(default_factory=list)  # decode rows, prompt tokens, seconds

    def percentiles(self) -> tuple[float, float, float, float]:
        """p50 and p99 of TTFT, then of TPOT, in milliseconds."""
        ttft, tpot = quantiles(self.ttft_s, n=100), quantiles(self.tpot_s, n=100)
        return 1e3 * ttft[49], 1e3 * ttft[98], 1e3 * tpot[49], 1e3 * tpot[98]


@dataclass
class TimedTicket:
    run: LoadRun
    end_s: float
    value: Result

    def result(self) -> Result:
        self.run.now_s = max(self.run.now_s, self.end_s)
        return self.value


class LoadRun:
    """A load on one engine; also the engine's executor. Plans run one after the other."""

    verifies_trees = False

    def __init__(self, load: Load, device: Device, prompt_cap: PromptCap | None, max_num_seqs: int = 256) -> None:
        self.load, self.device = load, device
        cache = KVCache(30_000, 16, (FULL,), enable_prefix_caching=False)
        scheduler = Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, prompt_cap=prompt_cap)
        self.engine = Engine(scheduler, self, overlap=1)
        self.now_s = 0.0
        self.latency = Latency()
        self._rng = random.Random(load.seed + 1)
        self._free_s = 0.0

    def start(self, plan: Plan) -> Ticket[Result]:
        num_decode = sum(row.count == 1 for row in plan.rows)
        num_prompt = plan.num_tokens - num_decode
        seconds = self.device.cost_s(num_decode, num_prompt, self._rng)
        self.latency.steps.append((num_decode, num_prompt, seconds))
        self._free_s = max(self._free_s, self.now_s) + seconds
        rows = [7 if row.output is Output.SAMPLE else RowResult() for row in plan.rows]
        return TimedTicket(self, self._free_s, Result(plan.number, rows, step_s=seconds))

    def control(self, message: object) -> Awaited[Answer]:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to close."""

    def run(self) -> Latency:
        load, engine, arrivals = self.load, self.engine, self.load.draw_arrivals()
        first_s: dict[str, float] = {}
        last_s: dict[str, float] = {}
        num_added = 0
        while num_added < len(arrivals) or engine.has_work:
            if not engine.has_work:
                self.now_s = max(self.now_s, arrivals[num_added])
            while num_added < len(arrivals) and arrivals[num_added] <= self.now_s:
                engine.add(self._make_request(num_added))
                num_added += 1
            for delta in engine.step():
                first_s.setdefault(delta.request_id, self.now_s)
                last_s[delta.request_id] = self.now_s
        for number, arrived_s in list(enumerate(arrivals))[load.num_skipped :]:
            begun_s = first_s[str(number)]
            self.latency.ttft_s.append(begun_s - arrived_s)
            self.latency.tpot_s.append((last_s[str(number)] - begun_s) / (load.num_output - 1))
        return self.latency

    def _make_request(self, number: int) -> Request:
        tokens = tuple(range(number * self.load.num_prompt, (number + 1) * self.load.num_prompt))
        sampling = SamplingParams(max_tokens=self.load.num_output)
        return Request(id=str(number), tokens=tokens, sampling=sampling, max_tokens=self.load.num_output, seed=0)


def run_loads(
    per_s: float, device: Device, make_cap: Callable[[], PromptCap | None], num_requests: int = 1500
) -> Latency:
    """Two loads of different seeds as one sample."""
    both = Latency()
    for seed in range(2):
        latency = LoadRun(Load(per_s, num_requests, seed=seed), device, make_cap()).run()
        both.ttft_s += latency.ttft_s
        both.tpot_s += latency.tpot_s
        both.steps += latency.steps
    return both


def main() -> None:
    devices = {
        "as measured": Device(),
        "200 hidden": Device(27.5e-6, 200),
        "none hidden": Device(25.5e-6, 0),
        "2 ms more a step": Device(24e-6, 0, 2e-3),
    }
    for name, device in devices.items():
        for per_s in RATES:
            for label, make_cap in (("no cap", lambda: None), ("cap", PromptCap)):
                latency = run_loads(per_s, device, make_cap)
                ttft, slow, tpot, slowest = latency.percentiles()
                longest = 1e3 * max(seconds for rows, _, seconds in latency.steps if rows)
                print(
                    f"{name:18}{per_s:3}/s {label:7} TTFT {ttft:4.0f}/{slow:4.0f} "
                    f"TPOT {tpot:4.1f}/{slowest:4.1f} longest step {longest:3.0f} ms"
                )


if __name__ == "__main__":
    main()
