"""What this machine has to give."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

M_ARENA_MAX = -8  # of glibc's malloc.h
PR_SET_PDEATHSIG = 1  # of prctl.h
MANY_NEW = 50_000  # objects: a step of 256 rows makes about a thousand, most of which it lets go of


def free_memory_bytes() -> int:
    """Memory that can be had without pushing others out."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def hold_few_heaps() -> None:
    """Let all threads share two heaps. By default glibc gives every new thread one of up to eight per core, and short
    threads one after another (a grammar is compiled in its own) leave each of them full of holes."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 2)


def python_command(module: str) -> tuple[str, ...]:
    """Run a module of ours in a new interpreter. Unlike `python -m`, it imports nothing from the current folder, which
    may be a stranger's."""
    return sys.executable, "-c", f"import sys; del sys.path[0]; from {module} import main; sys.exit(main())"


def die_with_parent() -> None:
    """Also when this process is stopped and cannot see that a pipe has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def held_collector() -> Iterator[None]:
    """No garbage is looked for inside the block: imports and models make much that stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def settle_collector() -> None:
    """What has been loaded stays: looking through it again takes longer than a step. So does looking through requests
    and plans, which leave next to no garbage in circles: that waits until there is much that is new."""
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    gc.set_threshold(first and max(MANY_NEW, first), *others)  # with 0 nothing is ever collected
