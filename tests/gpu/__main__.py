"""Run the checks in a few processes, one line for each: `python -m tests.gpu [--only WORDS] [--ops] [--jobs N]`.

A process that dies or hangs costs the check it was at. `PENSTOCK_TESTS_ON=cpu` tries the script out without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from typing import IO

from tests.gpu.check import Outcome

OPS = ("op ", "exact op ")
MARK = "@@"  # what else is printed is not ours
LIMIT_S = 200.0  # for one check
BUSY, FEW = ("first tokens",), 3  # that need processors of their own, and so many of them at once
LONG = ("deterministic", "smollm2", "op attention", "op product", "gguf", "grammars")  # to begin with
FATAL = ("CUDA error", "AcceleratorError", "CUBLAS_STATUS", "out of memory")  # after which a process is of no use


def load() -> dict[str, object]:
    from tests.gpu import (  # noqa: F401  they enter their checks
        adapters,
        captured,
        choices,
        codes,
        draft_models,
        drafts,
        encoders,
        exact,
        experts,
        families,
        files,
        fp8,
        hopper,
        ints,
        large,
        memory,
        meshes,
        offload,
        operations,
        processors,
        roads,
        samplers,
        start,
        thinking,
        verify,
    )
    from tests.gpu.check import CHECKS

    return dict(CHECKS)


def work() -> None:
    """Names in, outcomes out, a line each."""
    from tests.gpu.check import run

    load()
    print(MARK + "ready", flush=True)
    for line in sys.stdin:
        outcome = run(line.rstrip("\n"))
        print(MARK + json.dumps(asdict(outcome)), flush=True)
        if any(word in outcome.told for word in FATAL):
            sys.exit(1)


class Worker:
    """A process that runs checks; a new one takes its place when it is gone."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._ready = False
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def begin(self) -> subprocess.Popen[str]:
        """The process; it imports what it needs while others do other things."""
        if self._process is None or self._process.poll() is not None:
            self._ready = False
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.gpu", "--work"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        return self._process

    def run(self, name: str) -> Outcome:
        process = self.begin()
        if not self._ready:
            self._ready = bool(self._line(process))
        begun = time.perf_counter()
        watch = threading.Timer(LIMIT_S, process.kill)
        watch.start()
        try:
            assert process.stdin is not None
            process.stdin.write(name + "\n")
            process.stdin.flush()
            line = self._line(process)
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if line:
            return Outcome(**json.loads(line))
        self._errors.seek(0)
        return Outcome(name, False, time.perf_counter() - begun, "its process died", trace=self._errors.read()[-3000:])

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK).strip()
        return ""

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.close()
                self._process.wait(20)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()


def run_all(names: list[str], workers: list[Worker]) -> list[Outcome]:
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    outcomes: list[Outcome] = []

    def share(worker: Worker) -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            outcome = worker.run(name)
            outcomes.append(outcome)
            print(outcome, flush=True)
            if outcome.trace:
                print("    " + outcome.trace.strip().replace("\n", "\n    "), flush=True)

    threads = [threading.Thread(target=share, args=[worker]) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="checks whose name has these words; given again, those that have others, too",
    )
    parser.add_argument("--ops", action="store_true", help="the ops alone, with all their examples")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="processes")
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return 0
    import torch

    if os.environ.get("PENSTOCK_TESTS_ON", "cuda") == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that torch can use", file=sys.stderr)
        return 2
    if options.ops:
        os.environ["PENSTOCK_ALL_EXAMPLES"] = "1"
    begun = time.perf_counter()
    workers = [Worker() for _ in range(0 if options.list else options.jobs)]
    for worker in workers:
        worker.begin()
    names = [
        name
        for name in load()
        if (not options.ops or name.startswith(OPS)) and any(words in name for words in options.only or [""])
    ]
    names.sort(key=lambda name: not name.startswith(LONG))
    if options.list or not names:
        print("\n".join(names) or "no check has such a name")
    busy = [name for name in names if name.startswith(BUSY)]
    outcomes = (
        []
        if options.list
        else [*run_all(busy, workers[:FEW]), *run_all([name for name in names if name not in busy], workers)]
    )
    for worker in workers:
        worker.close()
    if not outcomes:
        return 0 if names else 2
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    skipped = sum(outcome.skipped for outcome in outcomes)
    print(
        f"{len(outcomes) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped in "
        f"{time.perf_counter() - begun:.0f} s" + "".join(f"\n  {name}" for name in failed)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
