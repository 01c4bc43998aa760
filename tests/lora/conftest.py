from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock import LoRARequest
from penstock.models.spec import FAMILIES
from tests.llm.tiny import write_tokenizer
from tests.lora import adapters
from tests.models import oracle

NUM_LORAS = 5


@dataclass(frozen=True)
class Lab:
    """A tiny model with a tokenizer, and adapters for it."""

    base: str
    folders: tuple[Path, ...]

    def lora(self, index: int, scale: float = 1.0) -> LoRARequest:
        return LoRARequest(f"lora-{index}", index + 1, str(self.folders[index]), scale)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Adapters of several ranks, on some linears or on all."""
    folder = tmp_path_factory.mktemp("lora")
    like = {**FAMILIES["LlamaForCausalLM"].like[0], "vocab_size": 300, "max_position_embeddings": 512}
    model = oracle.make("LlamaForCausalLM", like)
    base = oracle.save(model, folder / "base")
    write_tokenizer(base)
    ends = [None, ("q_proj", "v_proj"), ("down_proj", "o_proj"), None, ("gate_proj",)]
    made = [
        adapters.write(
            folder / f"lora-{index}", model, adapters.make_pairs(model, 4 + 3 * index, index, each), alpha=16
        )
        for index, each in enumerate(ends)
    ]
    assert len(made) == NUM_LORAS
    return Lab(str(base), tuple(made))
