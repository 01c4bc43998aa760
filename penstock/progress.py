"""A bar for work that takes longer than a second, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0

Report = Callable[[int, int], None]


@contextmanager
def loading_bar(enabled: bool) -> Iterator[Report | None]:
    """A callback (done, total) that draws a bar once a second has passed; None where nobody would see it."""
    if not enabled or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    start, bar = time.monotonic(), None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - start > PATIENCE_S:
            bar = tqdm(total=total, desc="Loading weights", unit="", unit_scale=True, leave=False, dynamic_ncols=True)
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()
