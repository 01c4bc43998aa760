"""The machine's memory, processes and garbage collector."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

M_ARENA_MAX = -8  # from glibc's malloc.h
MANY_NEW = 50_000  # a step of 256 rows makes about a thousand objects, most of them short-lived


def free_memory_bytes() -> int:
    """Return the memory available without swapping, in the machine and in the control groups of this process."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return min([available, *_group_rooms()])


def resident_bytes(pid: int | str = "self") -> int:
    """Return the memory that a process holds, maps of files included; 0 if that cannot be known."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _group_rooms() -> Iterator[int]:
    """Yield what each control group's limit leaves beside memory that cannot be dropped."""
    groups = [line.split(":", 2) for line in _read_lines(Path("/proc/self/cgroup"))]
    for _, controllers, group in (parts for parts in groups if len(parts) == 3):
        is_old = "memory" in controllers.split(",")
        if controllers and not is_old:
            continue
        root = Path("/sys/fs/cgroup/memory" if is_old else "/sys/fs/cgroup")
        limit, kept = ("memory.limit_in_bytes", "total_rss") if is_old else ("memory.max", "anon")
        place = root / group.strip("/")
        for folder in (place, *place.parents):
            most = "".join(_read_lines(folder / limit))
            used = dict(line.split(" ", 1) for line in _read_lines(folder / "memory.stat") if " " in line)
            if most.isdecimal() and used.get(kept, "").isdecimal():
                yield max(0, int(most) - int(used[kept]))
            if folder == root:
                break


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def hold_few_heaps() -> None:
    """Let all threads share two malloc arenas. By default glibc gives threads up to eight per core, and short-lived
    threads (one per grammar) leave them fragmented."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 2)


def python_command(module: str) -> tuple[str, ...]:
    """Return a command that runs a module of ours in a new interpreter. Unlike `python -m`, it imports nothing from
    the current folder, which may be untrusted."""
    return sys.executable, "-c", f"import sys; del sys.path[0]; from {module} import main; sys.exit(main())"


@contextmanager
def held_collector() -> Iterator[None]:
    """Pause the garbage collector: imports and models allocate much that stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def settle_collector() -> None:
    """Freeze everything loaded so far and collect rarely: a scan takes longer than a step, and requests leave few
    reference cycles."""
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    gc.set_threshold(first and max(MANY_NEW, first), *others)  # 0 disables collection
