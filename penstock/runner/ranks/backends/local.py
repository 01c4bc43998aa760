"""Ranks as child processes, which end with this one."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from penstock.runner.ranks.backends.task import COMMAND, RankTask

STOP_S = 5.0


class LocalRanks:
    """`make` gives the tasks, once rank 0's port is known. Children die with the thread that starts them, so that is a
    thread of its own, which lives as long as they may."""

    def __init__(self, make: Callable[[int], Sequence[RankTask]], command: Sequence[str] = COMMAND) -> None:
        self._make, self._command = make, tuple(command)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._begun: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, port: int) -> None:
        tasks = self._make(port)
        self._thread = threading.Thread(target=self._keep, args=(tasks,), name="penstock-ranks", daemon=True)
        self._thread.start()
        error = self._begun.get()
        if error is not None:
            raise error

    def _keep(self, tasks: Sequence[RankTask]) -> None:
        try:
            for task in tasks:
                self.processes[task.rank] = start_rank(task, self._command)
        except BaseException as error:
            self._begun.put(error)
            return
        self._begun.put(None)
        self._end.wait()

    def find_dead(self) -> str | None:
        for rank, process in self.processes.items():
            if process.poll() is not None:
                return f"rank {rank} (process {process.pid}) ended with status {process.returncode}"
        return None

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()

    def close(self) -> None:
        stop(self.processes)
        self._end.set()
        if self._thread is not None:
            self._thread.join()


def start_rank(task: RankTask, command: Sequence[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died already, which somebody will notice
        process.stdin.write(task.line)
        process.stdin.flush()
    return process


def stop(processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Wait for processes that were told to stop; kill those that do not."""
    for process in processes.values():
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
