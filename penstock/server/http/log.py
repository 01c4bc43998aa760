"""Set up the log, as text or JSON lines. Access lines are written by a thread and dropped if it falls behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import sys
import threading

ACCESS = "penstock.access"
FIELDS = "fields"  # attribute of a record: further JSON fields
MAX_WAITING = 10_000  # unwritten lines
PATIENCE_S = 1.0  # for the descriptor to become writable
CLOSE_S = 2.0


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class QueuedHandler(logging.Handler):
    """Write to a descriptor from a thread; if it blocks, lines are dropped and counted so that requests never wait."""

    def __init__(self, descriptor: int, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self.num_dropped = 0
        self._descriptor = descriptor
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._write_all, name="access-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
            self._thread.join(CLOSE_S)
        super().close()

    def _write_all(self) -> None:
        while (record := self._waiting.get()) is not None:
            if not self._write(record):
                self.num_dropped += 1
            elif self.num_dropped:
                num_dropped, self.num_dropped = self.num_dropped, 0
                self._write(
                    logging.LogRecord(
                        ACCESS,
                        logging.WARNING,
                        "",
                        0,
                        "%d access log lines were dropped: the log was not read",
                        (num_dropped,),
                        None,
                    )
                )

    def _write(self, record: logging.LogRecord) -> bool:
        try:
            if not select.select([], [self._descriptor], [], PATIENCE_S)[1]:
                return False
            os.write(self._descriptor, (self.format(record) + "\n").encode(errors="backslashreplace"))
        except (OSError, ValueError):  # a full disk or a closed descriptor
            return False
        return True


def set_up_log(form: str) -> None:
    formatter = JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("penstock").setLevel(logging.INFO)
    access = logging.getLogger(ACCESS)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no standard error
        queued = QueuedHandler(sys.stderr.fileno())
        queued.setFormatter(formatter)
        access.handlers, access.propagate = [queued], False
