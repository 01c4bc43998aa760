"""What went wrong with a download, in one line with a remedy."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import DownloadFailed, PenstockError
from penstock.hub.progress import readable_bytes

ROOM_BYTES = 8 << 20  # with less free, pip cannot even write why it failed
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|MaxRetryError|ConnectionError|"
    r"Connection (?:refused|reset|aborted|broken|error)|Network is unreachable|name resolution|Failed to establish",
    re.IGNORECASE,
)


@contextmanager
def download_errors(name: str, place: Path, variable: str = "PENSTOCK_HOME") -> Iterator[None]:
    """Turn the operating system's refusals under `place` into DownloadFailed; `variable` is what moves the place."""
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
        f"no room for {name}: {free} free under {place}{asks}; free some space or set {variable} to "
        "a folder on another disk"
    )


def free_bytes(place: Path) -> int:
    existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def pip_failed(name: str, requirement: str, place: Path, log: str) -> DownloadFailed:
    """Read pip's own words: unreachable before unknown, since pip calls a package it could not ask about unknown."""
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
