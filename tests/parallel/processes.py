"""Processes of ranks, as the machine sees them."""

from __future__ import annotations

import os
import time
from pathlib import Path


def children(pid: int) -> list[int]:
    """All living descendants of a process that are ranks."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if status[0] != "Z":
            parents[int(folder.name)] = int(status[1])
    found, edge = [], [pid]
    while edge:
        edge = [child for child, parent in parents.items() if parent in edge]
        found += edge
    return found


def is_rank(pid: int) -> bool:
    try:
        return b"penstock.api.ranks.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def ranks_of(pid: int) -> list[int]:
    return [child for child in children(pid) if is_rank(child)]


def wait_gone(pids: list[int], wait_s: float = 10.0) -> bool:
    """True once none of them lives."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if not any(os.path.exists(f"/proc/{pid}") and is_rank(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False
