"""Times at which a lone request passes the stations of the API process and the engine process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

PATH = os.environ.get("STREAMS_TRACE")
_file = os.open(PATH, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if PATH else None


def stamp(station: str) -> None:
    """Note the time, on the clock that all processes share; nothing without STREAMS_TRACE."""
    if _file is not None:
        os.write(_file, f"{time.perf_counter_ns()} {station}\n".encode())


def stamp_calls(owner: Any, name: str, station: str, *, after: bool = False) -> None:
    """Note the time before, or after, each call of a method."""
    plain: Callable[..., Any] = getattr(owner, name)

    @wraps(plain)
    def call(*given: Any, **named: Any) -> Any:
        if not after:
            stamp(station)
        returned = plain(*given, **named)
        if after:
            stamp(station)
        return returned

    setattr(owner, name, call)
