"""Models and servers for the tests that attack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hardening.counted import CountedServer
from tests.server.conftest import tiny_model as tiny_model


@pytest.fixture(scope="session")
def counted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountedServer]:
    """One server on a tiny model for all attacks of a worker that it must survive."""
    report = tmp_path_factory.mktemp("counted") / "callbacks.jsonl"
    with CountedServer(report, str(tiny_model), "--load-format", "dummy", "--threads", "1") as running:
        assert isinstance(running, CountedServer)
        running.forget()
        yield running
