"""Limits of memory and time for sandboxed processes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import InvalidRequest

MIB = 1 << 20
LOAD_BYTES = 3 << 30  # for a tokenizer with its vocabulary; 262,144 ids take some 400 MB
LOAD_S = 60.0  # of computing
TEXT_BYTES = 1 << 30  # for encoding a text, beside what the tokenizer takes
GRAMMAR_BYTES = 1536 * MIB  # for a grammar, its thread's stack of 512 MiB among them
RENDER_S = 5.0  # for a chat template, of computing
KEPT_BYTES = 128 * MIB  # a lane that has grown by more is not used again


def data_bytes(key: str = "VmData:") -> int:
    """Private memory of this process, as RLIMIT_DATA counts it; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


def limit_memory(more_bytes: int) -> None:
    """Let this process take `more_bytes` beyond what it has."""
    most = data_bytes() + more_bytes
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(cpu_s: float | None) -> None:
    """Let this process compute for so long from now on, however busy the machine is; then it ends. 0 lifts it."""
    if cpu_s is not None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


@contextlib.contextmanager
def rendering() -> Iterator[None]:
    """Within, Python code ends with an error once it has computed for RENDER_S."""

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
    """Leave processors to others: the engine's steps go first."""
    if niceness:
        with contextlib.suppress(OSError):
            os.nice(niceness)
