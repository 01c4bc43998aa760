"""The server that is measured: Penstock in a process of its own, or one that runs already."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.live.folder import write_folder
from bench.load.servers import POLL_S, Entry, Server
from bench.load.trial import ServerFailed
from bench.load.wire import Target, fetch

HEALTH = ("/health", "/v1/models")
HOST = "127.0.0.1"


class OwnServer:
    """`penstock serve` on a folder with random weights of a shape; it is started anew where a case wants that."""

    def __init__(self, shape: str, options: Sequence[str], start_s: float, log: Path | None = None) -> None:
        self.model = shape
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        self._log = log or self._folder / "server.log"
        self._options = ["--load-format", "dummy", *options]
        self._start_s = start_s
        self._server: Server | None = None
        self.is_fresh = False

    @property
    def target(self) -> Target:
        assert self._server is not None
        return self._server.target

    def start(self) -> float:
        """Start, or start again; return the seconds from the process's start until it is ready."""
        if not (self._folder / "config.json").exists():
            write_folder(self.model, self._folder)
        self.stop()
        port = _free_port()
        command = serve_command(str(self._folder), [*self._options, "--served-model-name", self.model], port)
        entry = Entry("penstock", f"http://{HOST}:{port}", command, model=self.model, start_s=self._start_s)
        self._server = Server(entry, self._log)
        self._server.start()
        self.is_fresh = True
        assert self._server.started_s is not None
        return self._server.started_s

    def check(self) -> None:
        if self._server:
            self._server.check()

    def stop(self) -> None:
        if self._server:
            self._server.stop()
            self._server = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class OtherServer:
    """Somebody else's, at `url`. It cannot be started again."""

    def __init__(self, url: str, model: str, api_key: str | None, start_s: float) -> None:
        self.target = Target.parse(url, api_key)
        self.model = model
        self._start_s = start_s
        self.is_fresh = True  # as far as is known

    def start(self) -> float:
        """Wait until it is ready; return the seconds that took."""
        begin = time.perf_counter()
        while not any(fetch(self.target, path, timeout_s=5.0)[0] == 200 for path in HEALTH):
            if time.perf_counter() - begin > self._start_s:
                raise ServerFailed(
                    f"{self.target.url} is not ready after {self._start_s:g} s: none of {', '.join(HEALTH)} answers 200"
                )
            time.sleep(POLL_S)
        return time.perf_counter() - begin

    def check(self) -> None:
        """Do nothing: its process is not ours."""

    def close(self) -> None:
        """Leave it running."""


def serve_command(folder: str, options: Sequence[str], port: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "penstock", "serve", folder, "--host", HOST, "--port", str(port), *options)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def gpu_name() -> str | None:
    """The first GPU, as its driver names it."""
    if not shutil.which("nvidia-smi"):
        return None
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
    return found[0].strip() if found else None
