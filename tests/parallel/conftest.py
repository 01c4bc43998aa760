from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.llm import tiny
from tests.parallel.group import Group


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights and a byte-level tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    tiny.write_config(folder, vocab_size=320, max_position_embeddings=4096)
    tiny.write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def group() -> Iterator[Group]:
    """Four rank processes for all tests of sharded models."""
    made = Group()
    yield made
    made.close()
