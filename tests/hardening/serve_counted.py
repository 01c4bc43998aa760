"""`penstock serve` that notes how much thread time each callback of its event loop takes, for tests.

Usage: python -m tests.hardening.serve_counted REPORT [arguments of penstock serve]. REPORT gets one line of JSON for
every callback over NOTED_S. It runs on asyncio's own loop: uvloop's callbacks cannot be wrapped.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

NOTED_S = 0.02


def count_callbacks(path: str) -> None:
    report = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the process lives
    run = asyncio.Handle._run

    def counted(handle: Any) -> None:
        what = handle._callback  # before: a handle that has run forgets it; shown without arguments
        begin, begin_wall = time.thread_time(), time.perf_counter()
        run(handle)
        seconds = time.thread_time() - begin
        if seconds > NOTED_S:
            wall = time.perf_counter() - begin_wall
            report.write(json.dumps({"thread_s": seconds, "wall_s": wall, "what": repr(what)[:300]}) + "\n")

    asyncio.Handle._run = counted  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    if os.environ.get("NAME_TASKS"):  # to find a slow one; these keep what failed until collected
        setattr(asyncio.tasks, "Task", getattr(asyncio.tasks, "_PyTask"))  # noqa: B009, B010
    count_callbacks(sys.argv[1])

    from penstock.cli import main

    sys.exit(main(["serve", *sys.argv[2:]]))
