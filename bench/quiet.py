"""Is the machine ours? Looked at while all engines rest."""

from __future__ import annotations

import time
from pathlib import Path

REST_S = 1.0
BUSY = 0.05  # of the cores' time; more is said with the results


def busy_share(seconds: float = REST_S) -> float | None:
    """The share of all cores' time that anyone used, a host's other guests included; None where it cannot be told."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None or after[1] == before[1]:
        return None
    return 1 - (after[0] - before[0]) / (after[1] - before[1])


def _ticks() -> tuple[int, int] | None:
    """Idle and all ticks since the start of the system."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]  # user … steal; guests are in user
    except OSError:
        return None
    ticks = [int(field) for field in fields]
    return ticks[3] + ticks[4], sum(ticks)
