"""A router and its servers, each in a process of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.server.running import RunningServer

KEY = "sesame"


def serve(model: Path, folder: Path, *more: str, **options: object) -> RunningServer:
    """A server of the tiny model with the router's key, not yet started."""
    key = folder / "router.key"
    key.write_text(KEY)
    arguments = (str(model), "--load-format", "dummy", "--threads", "1", "--served-model-name", "tiny")
    return RunningServer(*arguments, "--router-key-file", str(key), *more)


@contextlib.contextmanager
def route(servers: Sequence[RunningServer | str], folder: Path, *more: str) -> Iterator[RunningServer]:
    """A running router with the key."""
    (folder / "router.key").write_text(KEY)
    urls = [one if isinstance(one, str) else one.url for one in servers]
    command = (sys.executable, "-m", "penstock", "route", *urls, "--router-key-file", str(folder / "router.key"))
    with RunningServer("--heartbeat-s", "0.1", *more, command=command) as running:
        yield running
