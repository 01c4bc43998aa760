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
