"""Where Ctrl-C may take effect: between steps, never inside one, and not as an exception inside an import."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130      # the shell's exit code for Ctrl-C


@contextmanager
def final_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process at once. For importing large packages, which swallow the exception or break by it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended. Threads other than the main one are never interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for number, frame in held:
            handler(number, frame)
