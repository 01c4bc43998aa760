"""What this machine has to give."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory_bytes() -> int:
    """Memory that can be had without pushing others out."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
