"""Models that many tests share. Each test leaves them empty, and that is checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from tests.llm import tiny


@pytest.fixture(scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of two layers and 256 ids, no tokenizer."""
    return tiny.write_config(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with 300 ids, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "text"
    name = tiny.write_config(folder, vocab_size=300, max_position_embeddings=512)
    tiny.write_tokenizer(folder)
    return name


@pytest.fixture(scope="session")
def _shared(config_folder: str, text_folder: str) -> Iterator[dict[str, LLM]]:
    models = {"ids": tiny.dummy(config_folder), "text": tiny.dummy(text_folder, skip_tokenizer_init=False)}
    yield models
    for model in models.values():
        model.close()


def _lent(model: LLM) -> Iterator[LLM]:
    yield model
    idle(model)


@pytest.fixture
def llm(_shared: dict[str, LLM]) -> Iterator[LLM]:
    """Token ids in, token ids out."""
    yield from _lent(_shared["ids"])


@pytest.fixture
def text_llm(_shared: dict[str, LLM]) -> Iterator[LLM]:
    yield from _lent(_shared["text"])


def idle(model: LLM) -> None:
    """Nothing runs, waits or is held, and the books are right."""
    stats = model.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["num_used_blocks"]) == (0, 0, 0)
    assert not model.service.collectors
    model.service.engine.scheduler.check()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A Llama of 300 ids that transformers saved, with our tokenizer beside it, and transformers' own model."""
    from tests.models import oracle

    folder: Path = tmp_path_factory.mktemp("models") / "saved"
    config = {**tiny.FAMILIES["LlamaForCausalLM"].like[0], "vocab_size": 300, "max_position_embeddings": 256}
    theirs = oracle.make("LlamaForCausalLM", config, seed=5)
    oracle.save(theirs, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tiny.write_tokenizer(folder)
    return str(folder), theirs


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT that transformers saved; any tokenizer will do."""
    from tests.models import oracle

    folder: Path = tmp_path_factory.mktemp("models") / "bert"
    config = {**tiny.FAMILIES["BertModel"].like[0], "vocab_size": 300, "max_position_embeddings": 128}
    oracle.save(oracle.make("BertModel", config), folder)
    tiny.write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def real(checkpoint: tuple[str, Any]) -> Iterator[LLM]:
    """Penstock on that checkpoint, with keys and values as exact as the oracle's."""
    model = LLM(checkpoint[0], progress=False, threads=1, kv_cache_dtype="float32", kv_cache_tokens=2048)
    yield model
    model.close()


@pytest.fixture(scope="session")
def theirs(checkpoint: tuple[str, Any]) -> Any:
    return checkpoint[1]


@pytest.fixture
def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=8)
