"""Progress bars on standard error for work longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 1.0

Report = Callable[[int, int], None]


@contextmanager
def loading_bar(enabled: bool) -> Iterator[Report | None]:
    """Yield a callback (done, total) that draws a bar after one second; None where no terminal shows it."""
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


@contextmanager
def counting_bar(wanted: bool | Callable[..., Any], total: int, title: str) -> Iterator[Callable[[int], object]]:
    """Yield a callback that counts up to `total`; `wanted` may be a class to use instead of tqdm."""
    if not wanted:
        yield lambda count: None
        return
    from tqdm import tqdm

    bar = (wanted if callable(wanted) else tqdm)(total=total, desc=title, dynamic_ncols=True)
    try:
        yield lambda count: bar.update(count) if count else None
    finally:
        bar.close()


@contextmanager
def block_bar(enabled: bool, title: str) -> Iterator[Report]:
    """Yield a callback (done, total) that draws a bar of a model's blocks, with the time that is left."""
    if not enabled:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("blocks,"))
    times = (TimeElapsedColumn(), TextColumn("gone,"), TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
