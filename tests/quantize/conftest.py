"""A tiny Llama folder with a tokenizer and outliers among its inputs, and tokens to calibrate with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.files.convert import TINY, tiny_model

OTHER_KEYS = ("gpt2", "gptneox", "falcon", "bloom")  # whose configs spell sizes otherwise
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def write_folder(folder: Path, name: str = "llama", **changes: object) -> Path:
    """Random weights; norms with a few large values make some inputs matter more than others."""
    sizes = {"vocab_size": 256, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    if name.split("-")[0] not in OTHER_KEYS:
        sizes = {**TINY, "hidden_size": 64, "intermediate_size": 128, **sizes}
    model = tiny_model(name, {**sizes, **changes})
    random = torch.Generator().manual_seed(5)
    for key, tensor in model.state_dict().items():
        if "norm" in key:
            tensor.copy_(torch.rand(tensor.shape, generator=random).pow(4) * 3 + 0.1)
        elif ".layers." in key:
            tensor.mul_(0.4)  # so that errors do not grow from layer to layer
    model.bfloat16().save_pretrained(folder)
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
    """Put a tokenizer of 256 bytes into a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("quantize") / "tiny")


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    return torch.randint(256, (600,), generator=torch.Generator().manual_seed(3)).tolist()
