"""Signals: which of them stop a server and which one makes it read its keys and certificates again."""

from __future__ import annotations

import signal

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
RELOADING = signal.SIGHUP
LEFT = 128  # plus the signal's number: the exit status of a server that had not begun


def leave_on_signals() -> None:
    """Until the event loop takes them: leave in order, so that nothing stays behind. There is nothing to reload yet."""
    for number in STOPPING[1:]:
        signal.signal(number, _leave)
    signal.signal(RELOADING, signal.SIG_IGN)


def ignore_signals() -> None:
    """While the last things are cleared up: the event loop, when it closes, would let any signal kill the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, RELOADING))


def _leave(number: int, frame: object) -> None:
    raise SystemExit(LEFT + number)
