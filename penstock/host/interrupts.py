"""Let Ctrl-C take effect between steps only, never inside one or inside an import."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

INTERRUPTED = 130  # the shell's exit code for Ctrl-C


@contextmanager
def final_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process at once while importing large packages, which swallow the exception."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class _Watch:
    """SIGINT handler that calls the previous one at once, or after the block that defers it."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.depth = 0  # of blocks that defer it
        self.held: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.depth:
            self.held.append((number, frame))
        else:
            self.handler(number, frame)

    def deliver(self) -> None:
        held, self.held = self.held, []
        for number, frame in held:
            self.handler(number, frame)


@contextmanager
def watched_interrupts() -> Iterator[None]:
    """Install the handler once around a loop, so that deferring inside is cheap."""
    global _watch
    handler = signal.getsignal(signal.SIGINT)
    if _watch is not None or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch = watch = _Watch(handler)
    signal.signal(signal.SIGINT, watch)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        _watch = None
        watch.deliver()


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Defer Ctrl-C until the block ends. Only the main thread is ever interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with nullcontext() if _watch is not None else watched_interrupts():
        watch = _watch
        if watch is None:
            yield
            return
        watch.depth += 1
        try:
            yield
        finally:
            watch.depth -= 1
            if watch.held and not watch.depth:
                watch.deliver()


_watch: _Watch | None = None  # of the main thread
