"""Kernels compiled ahead, in processes beside the one that loads the model.

A foreman is forked before the GPU is opened: it shares all that has been imported. On the meta device it goes through
the steps that the engine will take, notes which kernels they ask for, and has each compiled in a process of its own,
the longest first. What comes of it is in Triton's cache on disk. Whatever goes wrong, the engine compiles for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

import penstock
from penstock.machine import die_with_parent
from penstock.ops.triton import elsewhere
from penstock.ops.triton.outline import Outlines
from penstock.runner.cuda.gpu import Glimpse
from penstock.runner.cuda.graphs import SingleSteps
from penstock.runner.cuda.warm import Work, first_steps, later_steps

LEAST_CORES = 4
MOST_PROCESSES = 8  # at a time
PATIENCE_S = 30.0  # without a word from the foreman
NICE = 10
SOURCES = ("ops/triton", "ops/triton/exact", "runner/cuda", "layers", "quant")
FIRST = "first"  # the foreman's word that what the first request takes is there
_log = logging.getLogger(__name__)

Outline = Callable[[], SingleSteps]  # the engine's steps on the meta device
Jobs = list[tuple[str, Work]]


class Ahead:
    """The foreman, as its parent sees it."""

    def __init__(self, pid: int, report: int) -> None:
        self._pid, self._report = pid, report
        self._ready = threading.Event()
        self._heard = time.monotonic()
        threading.Thread(target=self._listen, name="penstock-ahead", daemon=True).start()

    def _listen(self) -> None:
        with os.fdopen(self._report, errors="replace") as lines:
            for line in lines:
                self._heard = time.monotonic()
                if line.strip() == FIRST:
                    self._ready.set()
                else:
                    _log.debug("compiled ahead: %s", line.strip())
        self._ready.set()
        with contextlib.suppress(ChildProcessError):  # where the parent does not wait for its children
            os.waitpid(self._pid, 0)

    def wait(self) -> None:
        """Until the first kernels are there, or will not be. Others may still be compiled."""
        while not self._ready.wait(timeout=0.5):
            if time.monotonic() - self._heard > PATIENCE_S:
                _log.debug("compiled ahead: nothing heard for %.0f seconds, given up", PATIENCE_S)
                self.stop()
                return

    def stop(self) -> None:
        """Its own children die with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def num_processes(num_cores: int) -> int:
    """How many compile at once; 0 where that is not worth it."""
    text = os.environ.get("PENSTOCK_COMPILERS", "")
    if text.isdecimal():
        return int(text)
    return min(MOST_PROCESSES, num_cores // 2) if num_cores >= LEAST_CORES else 0


def begin(outline: Outline, described: str, gpu: Glimpse, num_cores: int) -> Ahead | None:
    """Start compiling what `outline` asks for, unless all that `described` stands for has been compiled before."""
    places = num_processes(num_cores)
    opened = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not places or opened or sys.platform != "linux" or triton.knobs.runtime.interpret:
        return None
    stamp = _stamp(described, gpu)
    if stamp.exists():
        return None
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of other threads; none of them holds what is used here
        pid = os.fork()
    if pid == 0:
        _lead(outline, gpu, stamp, places, writing)
    os.close(writing)
    return Ahead(pid, reading)


def _stamp(described: str, gpu: Glimpse) -> Path:
    """A file in Triton's cache whose name stands for everything that kernels depend on."""
    known = hashlib.sha256()
    for part in (described, repr(gpu), sys.version, torch.__version__, triton.__version__):
        known.update(part.encode())
    root = Path(penstock.__file__).parent
    for folder in SOURCES:
        for path in sorted((root / folder).glob("*.py")):
            known.update(path.read_bytes())
    return Path(elsewhere.cache_folder()) / f"penstock-{known.hexdigest()[:32]}"


def _lead(outline: Outline, gpu: Glimpse, stamp: Path, places: int, report: int) -> None:
    """The foreman's life; it does not return."""
    try:
        _settle()
        hashing = threading.Thread(target=elsewhere.hash_compiler)
        hashing.start()
        first, later = _jobs(outline, gpu)
        hashing.join()
        if _work(first, later, places, report):
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
    except BaseException as error:
        _say(report, f"nothing more: {error!r}")
    os._exit(0)


def _settle() -> None:
    """A forked process that says nothing, has no part in Ctrl-C, and gives way to others."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.nice(NICE)


def _jobs(outline: Outline, gpu: Glimpse) -> tuple[Jobs, Jobs]:
    """What the first request takes, the longest first, and what comes later."""
    elsewhere.stand_in(gpu.capability)
    with Outlines():  # type: ignore[no-untyped-call]
        singles = outline()
        _thin_out(singles)
        first = elsewhere.wanted(lambda: _run(first_steps(singles)))
        later = elsewhere.wanted(lambda: _run(later_steps(singles)))
    order = sorted(first.values(), key=lambda call: -call.weight)
    rest = [call for key, call in later.items() if key not in first]
    return (
        [("driver", elsewhere.compile_driver), *((call.name, call.compile) for call in order)],
        [(call.name, call.compile) for call in rest],
    )


def _thin_out(singles: SingleSteps) -> None:
    """Of layers that ask for the same kernels keep one; the last has fewer rows."""
    model = singles.model
    kept: dict[Any, Any] = {}
    for layer, block, cache in zip(model.spec.layers, model.blocks, singles.caches):
        places = () if cache is None else (cache.group, cache.k.data_ptr() % 16, cache.v.data_ptr() % 16)
        kept.setdefault((layer, places, block is model.blocks[-1]), (block, cache))
    model.blocks, singles.caches = [block for block, _ in kept.values()], [cache for _, cache in kept.values()]


def _run(steps: list[Work]) -> None:
    for step in steps:
        step()


def _work(first: Jobs, later: Jobs, places: int, report: int) -> bool:
    """Each job in a process of its own, so many at a time; whether all went well."""
    waiting = deque([*((True, *job) for job in first), *((False, *job) for job in later)])
    running: dict[int, bool] = {}  # whether the first request takes it
    well, told = True, False
    while waiting or running:
        while waiting and len(running) < places:
            is_first, name, job = waiting.popleft()
            pid = os.fork()
            if pid == 0:
                _do(name, job, report)
            running[pid] = is_first
        pid, status = os.wait()
        running.pop(pid, None)
        well = well and status == 0
        if not told and not any(running.values()) and not (waiting and waiting[0][0]):
            _say(report, FIRST)
            told = True
    return well


def _do(name: str, job: Work, report: int) -> None:
    status = 1
    try:
        die_with_parent()
        begun = time.monotonic()
        job()
        _say(report, f"{name} in {time.monotonic() - begun:.2f} s")
        status = 0
    except BaseException as error:
        _say(report, f"not {name}: {error!r}")
    os._exit(status)


def _say(report: int, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(report, " ".join(line.split()).encode()[:500] + b"\n")
