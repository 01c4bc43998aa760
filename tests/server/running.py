"""A server in a process of its own, as a user would start it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

START_S = 60.0
Running = TypeVar("Running", bound="RunningServer")


def free_port() -> int:
    """One that nobody listens on now; for servers whose log cannot be read."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(process: subprocess.Popen[Any], client: httpx.Client) -> None:
    """Until the server of that process is ready; at once an error where the process has ended."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health/ready").status_code == 200:
                return
        time.sleep(0.02)
    raise RuntimeError(f"the server did not become ready: its exit status is {process.poll()}")


class RunningServer:
    """Started on entry and ready; stopped on exit. `log` is what it wrote to standard error."""

    def __init__(
        self,
        *arguments: str,
        command: Sequence[str] = (sys.executable, "-m", "penstock", "serve"),
        env: dict[str, str] | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        """`verify` is for servers with a certificate of their own."""
        self.verify = verify
        self.arguments = [*command, *arguments, "--port", "0"]
        self.log: list[str] = []
        self.url = ""
        self._env = {**os.environ, **(env or {})}

    def __enter__(self: Running) -> Running:
        self.process = subprocess.Popen(
            self.arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=self._env
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_ready()
        return self

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))
                found = re.search(r"listening on (https?://[\w.:\[\]-]+)", line)
                if found:
                    self.url = found[1]

    def wait_ready(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            if self.url and httpx.get(f"{self.url}/health/ready", verify=self.verify).status_code == 200:
                return
            time.sleep(0.02)
        raise RuntimeError("the server did not become ready:\n" + "\n".join(self.log))

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        """Until a line of the log has that text."""
        end = time.monotonic() + timeout_s
        while not any(text in line for line in self.log):
            if time.monotonic() > end:
                raise RuntimeError(f"{text!r} was not logged:\n" + "\n".join(self.log))
            time.sleep(0.02)

    def engine_pid(self) -> int:
        info = httpx.get(f"{self.url}/info", verify=self.verify).json()
        return int(info["models"][0]["pid"])

    def stats(self) -> dict[str, float]:
        """By the engine's own account; told once a second."""
        found: dict[str, float] = httpx.get(f"{self.url}/info", verify=self.verify).json()["models"][0]["stats"]
        return found

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 45.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
