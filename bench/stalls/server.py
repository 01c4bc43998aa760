"""A server in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

START_S = 120.0


class ServerUnderTest:
    """`penstock serve` on a free port: started on entry and ready, stopped on exit."""

    def __init__(self, model: str, options: Sequence[str] = (), module: str | None = None) -> None:
        """`module` is run in place of the command, on a port that it chooses."""
        command = [module, model] if module else ["penstock", "serve", model, "--port", "0"]
        self._command = [sys.executable, "-m", *command, *options]
        self.url = ""

    def __enter__(self) -> ServerUnderTest:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            if self.url and httpx.get(f"{self.url}/health/ready").status_code == 200:
                return self
            time.sleep(0.05)
        self._process.kill()
        raise RuntimeError("the server did not become ready")

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r"listening on (http://[\w.:\[\]-]+)", line)
            if found:
                self.url = found[1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def rss_bytes(self) -> int:
        """Memory of the API process."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(45)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
