"""The machine: what it is, and what it can do at most (`limits.cpp`, compiled and run here)."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("limits.cpp")
CACHED_MB = (2, 16)  # working sets besides the files'
MEMORY_MB = 2000  # more than any cache holds
SIMD = ("sse", "avx", "fma", "f16c", "amx", "bmi", "asimd", "neon", "sve")


def measure(threads: int, cpu: str, megabytes: list[int], seconds: float) -> dict[str, Any]:
    """Read speed by working set, float and integer peaks; a note instead where they cannot be had."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return {"absent": "no C++ compiler was found: install g++ or set CXX"}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        built = subprocess.run(
            [compiler, "-O2", "-std=c++17", "-pthread", str(SOURCE), "-o", str(program)], capture_output=True, text=True
        )
        if built.returncode:
            return {"absent": f"limits.cpp does not compile: {built.stderr.strip()[:200]}"}
        sizes = sorted({*CACHED_MB, *megabytes, MEMORY_MB})
        path = "avx2" if cpu == "avx2" else "native"
        ran = subprocess.run(
            [str(program), str(threads), str(seconds), path, *map(str, sizes)], capture_output=True, text=True
        )
    if ran.returncode:
        return {"absent": f"limits ended with status {ran.returncode}: {ran.stderr.strip()[:200]}"}
    limits: dict[str, Any] = json.loads(ran.stdout)
    return limits | {"threads": threads}


def read_limit(limits: Mapping[str, Any], num_bytes: float) -> float | None:
    """GB/s for a working set of so many bytes: what was measured for the next larger one."""
    speeds = {int(size): speed for size, speed in limits.get("read_gb_per_s", {}).items()}
    fitting = [size for size in speeds if size * 1e6 >= num_bytes]
    return speeds[min(fitting)] if fitting else speeds.get(max(speeds, default=0))


def operation_limit(limits: Mapping[str, Any], kind: str) -> float | None:
    """The highest peak of a kind ("dot" or "fma"), in 1e9 operations per second."""
    return max((value for name, value in limits.items() if name.startswith(kind + "_")), default=None)


def machine() -> dict[str, Any]:
    info = _cpuinfo()
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": [flag for flag in info.get("flags", "").split() if flag.startswith(SIMD)],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def commit(root: Path) -> dict[str, Any]:
    """The commit, and whether the tree differs from it (results aside)."""

    def git(*words: str) -> str:
        if not shutil.which("git"):
            return ""
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True).stdout.strip()

    changed = [line for line in git("status", "--porcelain").splitlines() if "bench/results" not in line]
    return {"commit": git("rev-parse", "HEAD") or None, "changed": bool(changed)}
