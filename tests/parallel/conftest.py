from __future__ import annotations

import pytest

from tests.llm import tiny


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights and a byte-level tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    tiny.write_config(folder, vocab_size=320, max_position_embeddings=4096)
    tiny.write_tokenizer(folder)
    return str(folder)
