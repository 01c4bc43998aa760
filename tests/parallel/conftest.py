from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.models.spec import FAMILIES
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


@pytest.fixture(scope="session")
def lora_lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A tiny Llama, and adapters of all of its linears, of some, and of the embedding and the head too."""
    from tests.lora import adapters
    from tests.models import oracle

    folder = tmp_path_factory.mktemp("ranks-lora")
    like = {**FAMILIES["LlamaForCausalLM"].like[0], "max_position_embeddings": 512}
    model = oracle.make("LlamaForCausalLM", like)
    made = [
        adapters.write(folder / f"lora-{seed}", model, adapters.make_pairs(model, 4 + 3 * seed, seed, ends), alpha=16)
        for seed, ends in enumerate([None, ("q_proj", "v_proj", "down_proj"), ("o_proj", "lm_head", "embed_tokens")])
    ]
    return str(oracle.save(model, folder / "base")), [str(each) for each in made]
