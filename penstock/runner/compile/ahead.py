"""Compile kernels ahead of time, in processes beside the one that loads the model.

A coordinator is forked before CUDA is initialized, so that it shares all imports. It runs the engine's warm-up steps on
the meta device, records the kernels they launch, and compiles each in a process of its own, the longest first, into
Triton's cache on disk. If anything fails, the engine compiles for itself.
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
from penstock.host.parent import die_with_parent
from penstock.passes.outline import tensors_of
from penstock.runner.compile import cross
from penstock.runner.compile.meta_shapes import MetaShapes
from penstock.runner.compile.warm import Work, first_steps, later_steps
from penstock.runner.cuda.decode_graphs import DecodeGraphs
from penstock.runner.cuda.gpu import DriverInfo

MIN_CORES = 4
MAX_PROCESSES = 8  # at a time
TIMEOUT_S = 30.0  # without a message from the coordinator
NICE = 10
SOURCES = ("ops", "runner/cuda", "runner/compile", "layers", "quant", "passes")  # what decides which kernels there are
FIRST = "first"  # the coordinator's message that the first request's kernels are compiled
_log = logging.getLogger(__name__)

MakeSteps = Callable[[], DecodeGraphs]  # makes the engine's steps on the meta device
Jobs = list[tuple[str, Work]]


class AheadCompiler:
    """A handle to the coordinator, for its parent."""

    def __init__(self, pid: int, report: int) -> None:
        self._pid, self._report = pid, report
        self._ready = threading.Event()
        self.done = threading.Event()  # all that could be compiled is
        self._heard = time.monotonic()
        threading.Thread(target=self._listen, name="penstock-ahead", daemon=True).start()

    def _listen(self) -> None:
        with os.fdopen(self._report, errors="replace") as lines:
            for line in lines:
                self._heard = time.monotonic()
                if line.strip() == FIRST:
                    self._ready.set()
                else:
                    _log.debug("compile-ahead: %s", line.strip())
        self._ready.set()
        self.done.set()
        with contextlib.suppress(ChildProcessError):  # where the parent does not wait for its children
            os.waitpid(self._pid, 0)

    def wait(self) -> None:
        """Wait until the first request's kernels are compiled or have failed; later ones may still be compiling."""
        while not self._ready.wait(timeout=0.5):
            if time.monotonic() - self._heard > TIMEOUT_S:
                _log.debug("compile-ahead: no message for %.0f seconds, giving up", TIMEOUT_S)
                self.stop()
                return

    def stop(self) -> None:
        """Kill the coordinator; its children die with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def num_processes(num_cores: int) -> int:
    """Return how many kernels to compile at once; 0 on machines with few cores."""
    text = os.environ.get("PENSTOCK_COMPILERS", "")
    if text.isdecimal():
        return int(text)
    return min(MAX_PROCESSES, num_cores // 2) if num_cores >= MIN_CORES else 0


def start_compiling(make_steps: MakeSteps, described: str, gpu: DriverInfo, num_cores: int) -> AheadCompiler | None:
    """Start compiling the kernels of the steps, unless those of the same description have been compiled before."""
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
        _coordinate(make_steps, gpu, stamp, places, writing)
    os.close(writing)
    return AheadCompiler(pid, reading)


def _stamp(described: str, gpu: DriverInfo) -> Path:
    """Return a file in Triton's cache whose name is a hash of everything that decides the kernels."""
    known = hashlib.sha256()
    for part in (described, repr(gpu), sys.version, torch.__version__, triton.__version__):
        known.update(part.encode())
    root = Path(penstock.__file__).parent
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            known.update(path.read_bytes())
    return Path(cross.cache_folder()) / f"penstock-{known.hexdigest()[:32]}"


def _coordinate(make_steps: MakeSteps, gpu: DriverInfo, stamp: Path, places: int, report: int) -> None:
    """Run the coordinator and exit the process."""
    try:
        _detach()
        hashing = threading.Thread(target=cross.hash_compiler)
        hashing.start()
        first, later = _list_jobs(make_steps, gpu)
        hashing.join()
        if _run_jobs(first, later, places, report):
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
    except BaseException as error:
        _send(report, f"nothing more: {error!r}")
    os._exit(0)


def _detach() -> None:
    """Make a forked process silent, deaf to Ctrl-C and low in priority."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.nice(NICE)


def _list_jobs(make_steps: MakeSteps, gpu: DriverInfo) -> tuple[Jobs, Jobs]:
    """Return compile jobs for the first request, the longest first, and for later ones."""
    cross.set_target(gpu.capability)
    with MetaShapes():  # type: ignore[no-untyped-call]
        singles = make_steps()
        _drop_duplicate_blocks(singles)
        first = cross.record_calls(lambda: _run(first_steps(singles)))
        later = cross.record_calls(lambda: _run(later_steps(singles)))
    order = sorted(first.values(), key=lambda call: -call.weight)
    rest = [call for key, call in later.items() if key not in first]
    return (
        [("driver", cross.compile_driver), *((call.name, call.compile) for call in order)],
        [(call.name, call.compile) for call in rest],
    )


def _drop_duplicate_blocks(singles: DecodeGraphs) -> None:
    """Keep one of the layers that launch the same kernels, and the last, which has fewer rows."""
    model = singles.model
    kept: dict[Any, Any] = {}
    for layer, block, cache in zip(model.spec.layers, model.blocks, singles.caches):
        tensors = [value for value in vars(cache).values() if isinstance(value, torch.Tensor)] if cache else []
        aligned = tuple(tensor.data_ptr() % 16 for tensor in tensors)
        stored = tuple(sorted((str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors_of(block)))
        kernels = getattr(block, "kernels", None)  # of one with offloaded weights
        is_last = block is model.blocks[-1]
        kept.setdefault((layer, cache and cache.group, aligned, stored, kernels, is_last), (block, cache))
    model.blocks, singles.caches = [block for block, _ in kept.values()], [cache for _, cache in kept.values()]


def _run(steps: list[Work]) -> None:
    for step in steps:
        step()


def _run_jobs(first: Jobs, later: Jobs, places: int, report: int) -> bool:
    """Run each job in a process of its own, `places` at a time; return True if all succeeded."""
    waiting = deque([*((True, *job) for job in first), *((False, *job) for job in later)])
    running: dict[int, bool] = {}  # pid → the first request needs it
    succeeded, is_first_sent = True, False
    while waiting or running:
        while waiting and len(running) < places:
            is_first, name, job = waiting.popleft()
            pid = os.fork()
            if pid == 0:
                _run_job(name, job, report)
            running[pid] = is_first
        pid, status = os.wait()
        running.pop(pid, None)
        succeeded = succeeded and status == 0
        if not is_first_sent and not any(running.values()) and not (waiting and waiting[0][0]):
            _send(report, FIRST)
            is_first_sent = True
    return succeeded


def _run_job(name: str, job: Work, report: int) -> None:
    status = 1
    try:
        die_with_parent()
        begun = time.monotonic()
        job()
        _send(report, f"{name} in {time.monotonic() - begun:.2f} s")
        status = 0
    except BaseException as error:
        _send(report, f"not {name}: {error!r}")
    os._exit(status)


def _send(report: int, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(report, " ".join(line.split()).encode()[:500] + b"\n")
