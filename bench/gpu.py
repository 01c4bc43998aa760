"""Output tokens per second on one GPU: random weights of real shapes, the request sets of `gpu_sets`.

Each shape runs in a process of its own, from its start: ready is when the first token of a request of 128 tokens has
come, imports included. Then the first set once, unprepared; then a warm-up; then every set with two seeds, of which the
faster counts. One line of JSON per case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_sets import KINDS, SHAPES, requests

WARM_SEED, SEEDS = 9, (1, 2)
WARM_SETS = (("bs1", 1), ("256x128in512out", 64))


def age_s() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Case:
    """One shape, one quantization, one process."""

    def __init__(self, shape: str, options: dict[str, Any]) -> None:
        from penstock import LLM

        folder = tempfile.mkdtemp()
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        self.shape, self.options = shape, options
        self.llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=17000,
                       gpu_memory_utilization=0.85, max_num_seqs=256, seed=0, progress=False, **options)
        self.loaded_s = age_s()
        self.run([(list(range(2000, 2128)), 1)])
        self.ready_s = age_s()

    def run(self, items: list[tuple[list[int], int]]) -> dict[str, Any]:
        from penstock import SamplingParams

        params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=count) for _, count in items]
        service = self.llm.service
        self.llm.reset_prefix_cache()
        before = service.stats()
        runner: Any = getattr(service.engine.executor, "runner", None)
        timeline: list[Any] = []
        if hasattr(runner, "timeline"):
            runner.timeline = timeline
        begin = time.perf_counter()
        outputs = self.llm.generate([prompt for prompt, _ in items], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        if lengths != [count for _, count in items]:
            raise AssertionError("every output must have its requested length")
        after = service.stats()
        steps = after["num_steps"] - before["num_steps"]
        waited = after["forward_s"] - before["forward_s"]
        idle = [a[1].elapsed_time(b[0]) for a, b in zip(timeline, timeline[1:])]
        total = sum(lengths) + sum(len(prompt) for prompt, _ in items)
        return {"s": round(seconds, 3), "out_tok_s": round(sum(lengths) / seconds, 1),
                "total_tok_s": round(total / seconds, 1), "steps": steps,
                "host_ms_per_step": round((seconds - waited) / steps * 1e3, 3),
                "idle_ms_per_step": round(sum(max(0.0, gap) for gap in idle) / steps, 3),
                "cached_tokens": after["num_cached_tokens"] - before["num_cached_tokens"]}

    def report(self, kind: str, figures: dict[str, Any], **more: Any) -> None:
        print(json.dumps({"engine": "penstock", "shape": self.shape, **self.options, "kind": kind, **figures, **more}),
              flush=True)

    def measure(self, kinds: list[str]) -> None:
        self.report("start", {"loaded_s": round(self.loaded_s, 2), "ready_s": round(self.ready_s, 2)})
        first = self.run(requests(kinds[0], 5))
        for kind, count in WARM_SETS:
            self.run(requests(kind, WARM_SEED)[:count])
        for kind in kinds:
            best = max((self.run(requests(kind, seed)) for seed in SEEDS), key=lambda run: run["out_tok_s"])
            self.report(kind, best, **({"first_out_tok_s": first["out_tok_s"]} if kind == kinds[0] else {}))


def ceilings() -> dict[str, float]:
    """What the device copies and multiplies at best."""
    import torch

    def fastest(work: Any, count: int = 10) -> float:
        times = []
        for _ in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return float(min(times))

    a = torch.randint(256, (1 << 31,), dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copied = 2 * a.numel() / fastest(lambda: b.copy_(a))
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    multiplied = 2 * 8192**3 / fastest(lambda: x @ y)
    return {"copy_tb_s": round(copied / 1e12, 2), "bf16_tflop_s": round(multiplied / 1e12)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of LLM, for instance "
                        "enforce_eager=true")
    parser.add_argument("--deterministic", action="append_const", dest="option", const="deterministic=true",
                        help="what exact bodies cost")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    shapes, kinds = given.shape or list(SHAPES), given.kind or list(KINDS)
    options = {name: json.loads(value) if value in ("true", "false") or value.isdigit() else value
               for name, _, value in (option.partition("=") for option in given.option)}
    if given.inside:
        Case(shapes[0], options).measure(kinds)
        return
    import torch

    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **ceilings()}), flush=True)
    for shape in shapes:
        passed = [part for kind in kinds for part in ("--kind", kind)] + [
            part for option in given.option for part in ("--option", option)]
        subprocess.run([sys.executable, "-m", "bench.gpu", "--inside", "--shape", shape, *passed], check=True)


if __name__ == "__main__":
    main()
