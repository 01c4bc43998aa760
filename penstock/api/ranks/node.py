"""Run the ranks of a further machine, and start them again when machine 0's engine is replaced."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from types import FrameType

from penstock.api.ranks.identity import require_credentials
from penstock.api.ranks.ranks import make_tasks
from penstock.api.ranks.share import make_layout
from penstock.config import EngineConfig
from penstock.config.ranks import check_layout
from penstock.runner.ranks.backends.local import start_rank, stop
from penstock.runner.ranks.backends.task import COMMAND, REFUSED

CHECK_S = 0.2
PAUSE_S = 0.5  # before they are started again
_log = logging.getLogger("penstock.ranks")


def run_node(model: str, config: EngineConfig) -> int:
    """Run this machine's ranks until told to stop, or until machine 0 refuses them; returns the exit status."""
    check_layout(config)
    require_credentials(config)
    stopping = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    tasks = make_tasks(config, model, config.node_rank, (config.master_addr, config.master_port))
    ranks = make_layout(config).list_ranks(config.node_rank)
    while not stopping.is_set():
        _log.warning(
            "ranks %s: waiting for machine 0 at %s:%d",
            ", ".join(map(str, ranks)),
            config.master_addr,
            config.master_port,
        )
        processes = {task.rank: start_rank(task, COMMAND) for task in tasks}
        status = _await_end(processes, stopping)
        for process in processes.values():
            process.kill()
        stop(processes)
        if status == REFUSED:
            return 1
        stopping.wait(PAUSE_S)
    return os.EX_OK


def _await_end(processes: dict[int, subprocess.Popen[bytes]], stopping: threading.Event) -> int | None:
    """Wait until one has ended; returns its status, None if told to stop."""
    while not stopping.wait(CHECK_S):
        for process in processes.values():
            if process.poll() is not None:
                return process.returncode
    return None
