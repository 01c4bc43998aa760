"""Memory and time limits of sandboxed processes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import InvalidRequest

MIB = 1 << 20
LOAD_BYTES = 3 << 30  # for a tokenizer and its vocabulary; 262,144 ids take about 400 MB
LOAD_S = 60.0  # CPU time
TEXT_BYTES = 1 << 30  # for encoding a text, beyond the tokenizer's own
GRAMMAR_BYTES = 1536 * MIB  # for a grammar, including its thread's stack of 512 MiB
RENDER_S = 5.0  # CPU time of a chat template
KEPT_BYTES = 128 * MIB  # a lane that grew by more is not reused


def data_bytes(key: str = "VmData:") -> int:
    """Return this process's private memory as RLIMIT_DATA counts it; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


def limit_memory(more_bytes: int) -> None:
    """Allow this process `more_bytes` beyond its present memory."""
    most = data_bytes() + more_bytes
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(cpu_s: float | None) -> None:
    """End this process after `cpu_s` more seconds of CPU time; 0 lifts the limit."""
    if cpu_s is not None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


@contextlib.contextmanager
def limit_render_time() -> Iterator[None]:
    """Raise InvalidRequest in Python code that runs longer than RENDER_S of CPU time."""

    def end(number: int, frame: object) -> None:
        raise InvalidRequest(
            f"the model's chat template did not end within {RENDER_S:g} s on these messages: send fewer"
        )

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def step_back(niceness: int) -> None:
    """Lower this process's priority: the engine's steps go first."""
    if niceness:
        with contextlib.suppress(OSError):
            os.nice(niceness)
