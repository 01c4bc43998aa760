"""Servers started from commands in a TOML file (bench/servers.example.toml)."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import string
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load.trial import ServerFailed
from bench.load.wire import Target, fetch

LOG_LINES = 4
STOP_S = 20.0
POLL_S = 0.1


@dataclass(frozen=True)
class Entry:
    """A server: how it is started (not at all when there is no command), where it listens, what it calls the model."""

    name: str
    url: str
    command: tuple[str, ...] = ()
    health: str = "/health"
    model: str = "smollm2"
    api_key: str | None = None
    start_s: float = 300.0  # it has to be healthy by then
    env: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields for its requests' bodies


def read_entries(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """The servers that are there, and for each that is not, why. `$NAME` stands for an environment variable."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    entries: list[Entry] = []
    absent: dict[str, str] = {}
    for table in document.get("server", []):
        if missing := {"name", "url"} - set(table):
            raise ValueError(f"{path}: a server has no {' and no '.join(sorted(missing))}")
        if unknown := set(table) - set(Entry.__dataclass_fields__):
            raise ValueError(
                f"{path}, {table['name']}: {', '.join(sorted(unknown))} is unknown: choose from "
                f"{', '.join(Entry.__dataclass_fields__)}"
            )
        try:
            entry = _entry(table)
        except KeyError as error:
            absent[table["name"]] = f"the environment variable {error.args[0]} is not set"
            continue
        if entry.command and not shutil.which(entry.command[0], path=entry.env.get("PATH")):
            absent[entry.name] = f"{entry.command[0]} is not installed"
        else:
            entries.append(entry)
    return entries, absent


def _entry(table: Mapping[str, Any]) -> Entry:
    def filled(text: str) -> str:
        return os.path.expanduser(string.Template(text).substitute(os.environ))

    command = table.get("command", ())
    words = shlex.split(command) if isinstance(command, str) else command
    values = {name: filled(value) if isinstance(value, str) else value for name, value in table.items()}
    return Entry(
        **values
        | {
            "command": tuple(map(filled, words)),
            "env": {name: filled(str(value)) for name, value in table.get("env", {}).items()},
        }
    )


class Server:
    """A process (and its children) that is ended with the block, or a server that runs already."""

    def __init__(self, entry: Entry, log: Path) -> None:
        self.entry, self.log = entry, log
        self.target = Target.parse(entry.url, entry.api_key)
        self.started_s: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        begin = time.perf_counter()
        if self.entry.command:
            if self._healthy():
                raise ServerFailed(f"something answers at {self.entry.url} already: stop it or choose another port")
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.entry.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.entry.env},
                    start_new_session=True,
                )
        while not self._healthy():
            self.check()
            if not self._process or time.perf_counter() - begin > self.entry.start_s:
                raise ServerFailed(
                    f"{self.entry.url}{self.entry.health} is not well after "
                    f"{time.perf_counter() - begin:.0f} s: {self._last_words()}"
                )
            time.sleep(POLL_S)
        self.started_s = time.perf_counter() - begin

    def check(self) -> None:
        """Raise an error with the log's last lines if the process has ended."""
        if self._process and self._process.poll() is not None:
            raise ServerFailed(f"the process ended with status {self._process.returncode}: {self._last_words()}")

    def _healthy(self) -> bool:
        return fetch(self.target, self.entry.health, timeout_s=5.0)[0] == 200

    def _last_words(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return " / ".join([line for line in text.splitlines() if line.strip()][-LOG_LINES:])

    def stop(self) -> None:
        if not self._process:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(STOP_S)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue
