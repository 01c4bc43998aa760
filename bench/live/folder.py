"""A model of a real shape that any engine can serve with random weights: its config and a made-up tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

from bench.gpu_sets import SHAPES

SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0 to 2; the shapes have 1 and 2 as the ends of a text
SPACE = "Ġ"  # a space, as byte-level tokenizers write it


def write_folder(shape: str, folder: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json. The weights are the engine's to draw."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_tokenizer(folder / "tokenizer.json", int(config["vocab_size"]))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "model_max_length": config["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_tokenizer(path: Path, num_tokens: int) -> None:
    """Write a byte-level BPE in which every id has a text, most of them of four letters, as in trained ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = list(islice(_merges(), num_tokens - len(letters)))
    vocabulary = {text: number for number, text in enumerate([*letters, *(left + right for left, right in merges)])}
    if len(vocabulary) != num_tokens:
        raise ValueError(f"a vocabulary of {num_tokens} tokens cannot be made: {len(vocabulary)} have a text")
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.save(str(path))


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs of letters or of a space and a letter, then triples, then quadruples."""
    pairs = list(product([SPACE, *ascii_lowercase], ascii_lowercase))
    yield from pairs
    for left, right in pairs:
        yield from ((left + right, third) for third in ascii_lowercase)
    tails = [left + right for left, right in pairs if left != SPACE]
    for tail in tails:
        yield from ((left + right, tail) for left, right in pairs)
