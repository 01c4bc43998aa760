"""The parent of a worker process: it sends the task as the first line of standard input, and closes it by its end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

STDIN = 0
ORPHANED = 3  # exit status
PR_SET_PDEATHSIG = 1  # from prctl.h


def die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_first_line() -> bytes:
    """Read one line unbuffered: a thread blocked in Python's buffer would hold its lock until exit."""
    line = b""
    while not line.endswith(b"\n") and (part := os.read(STDIN, 4096)):
        line += part
    return line


def watch_parent() -> None:
    """End this process when standard input ends, and leave Ctrl-C to the parent, which then stops us."""
    threading.Thread(target=_exit_at_end, name="penstock-parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exit_at_end() -> None:
    while os.read(STDIN, 4096):
        pass
    os._exit(ORPHANED)
