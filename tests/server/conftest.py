"""One server on the default model for all tests of a worker that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.llm import tiny
from tests.server.running import RunningServer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with RunningServer("smollm2", "--max-model-len", "2048") as running:
        yield running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a byte-level tokenizer with a chat template; loads in no time."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_config(folder, vocab_size=320, max_position_embeddings=4096)
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def keeping(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With two tenants, `one` and `two`, an admin, `root`, and a folder of files."""
    with RunningServer(
        str(tiny_model),
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--served-model-name",
        "tiny",
        "--api-key",
        "one",
        "--api-key",
        "two",
        "--admin-key",
        "root",
        "--max-files-mb",
        "8",
        "--data-folder",
        str(tmp_path_factory.mktemp("data")),
    ) as running:
        yield running
