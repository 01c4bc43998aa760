"""Set the number of threads that the kernels share; it never changes a result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.errors import InvalidConfig
from penstock.ops.cpu.runtime import library

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # Linux control groups: "<microseconds>|max <period>"


def available_cores() -> int:
    """Count the cores this process may use, within its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return cores


def set_num_threads(count: int) -> int:
    """Run kernels on this many threads, the caller's included; give the number that the system granted."""
    if not 1 <= count <= 256:
        raise InvalidConfig(f"num_threads={count} is out of range: it must be 1 to 256")
    library.changes += 1
    return 1 if library._library is None else int(library._library.penstock_set_num_threads(count))


def num_threads() -> int:
    return 1 if library._library is None else int(library._library.penstock_num_threads())


@contextmanager
def limit_torch() -> Iterator[None]:
    """Keep torch on the calling thread inside the block, so that its threads never compete with the kernels'."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _read_environment() -> int:
    text = os.environ.get("PENSTOCK_THREADS")
    if not text:
        return min(available_cores(), 256)
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise InvalidConfig(f"PENSTOCK_THREADS={text!r} is out of range: it must be 1 to 256, or unset for all cores")
    return int(text)


set_num_threads(_read_environment())
