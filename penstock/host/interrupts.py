"""Let signals take effect between steps only, never inside one or inside an import."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

EXIT_BASE = 128  # plus the signal's number: the shell's exit code for a signal
INTERRUPTED = EXIT_BASE + signal.SIGINT


@contextmanager
def final_interrupts() -> Iterator[None]:
    """End the process at once on SIGINT or SIGTERM while importing: an exception inside an import may be swallowed, or
    leave import locks held."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, _end_at_once) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_BASE + number)


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
