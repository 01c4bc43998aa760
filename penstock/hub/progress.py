"""Bytes on their way, shown on standard error."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


def readable_bytes(num_bytes: int) -> str:
    """93.8 MB, as pip and the hub write it: powers of 1000."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class ByteBar:
    """A bar that redraws often on a terminal and rarely in a log file."""

    def __init__(self, label: str, shown: bool) -> None:
        self._label = label
        self._shown = shown
        self._bar: Any = None

    def __enter__(self) -> ByteBar:
        if self._shown:
            from tqdm import tqdm

            self._bar = tqdm(
                desc=self._label,
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                dynamic_ncols=True,
                mininterval=0.1 if sys.stderr.isatty() else 5,
            )
        return self

    def update(self, num_bytes: int, total: int | None = None) -> None:
        if self._bar is None:
            return
        if total and total != self._bar.total:
            self._bar.total = max(total, num_bytes)
        self._bar.update(max(0, num_bytes - self._bar.n))

    def finish(self, num_bytes: int) -> None:
        if self._bar is not None:
            self.update(num_bytes)
            self._bar.total = num_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.leave = kind is None
            self._bar.close()


def note(text: str, shown: bool = True) -> None:
    if shown:
        print(text, file=sys.stderr, flush=True)
