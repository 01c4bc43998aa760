"""A running server whose event loop is counted: what every callback takes of the thread, and how memory grows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.server.running import RunningServer

MAX_CALLBACK_S = 0.1


class CountedServer(RunningServer):
    def __init__(self, report: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        super().__init__(
            *arguments, command=(sys.executable, "-m", "tests.hardening.serve_counted", str(report)), env=env
        )
        self.report = report
        self._num_read = 0

    def callbacks(self) -> list[dict[str, object]]:
        """Those over 20 ms since the last call (or since `forget`), longest first."""
        lines = self.report.read_text().splitlines() if self.report.exists() else []
        new, self._num_read = lines[self._num_read :], len(lines)
        return sorted((json.loads(line) for line in new), key=lambda one: -one["thread_s"])

    def forget(self) -> None:
        """Leave out what came before: imports and the first use of each part."""
        self.callbacks()

    def check_callbacks(self) -> None:
        slow = [one for one in self.callbacks() if float(str(one["thread_s"])) > MAX_CALLBACK_S]
        assert not slow, slow[:3]

    def forget_peak(self) -> None:
        """Let the peak of memory begin with what is held now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def rss_bytes(self, peak: bool = False) -> int:
        """Memory of the API process."""
        key = "VmHWM:" if peak else "VmRSS:"
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise RuntimeError("the server is gone")
