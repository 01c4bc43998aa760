"""All of a tokenizer that is no program: plain data, which may cross from one process to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.text.infill import Marks


@dataclass(frozen=True)
class TokenizerFacts:
    kind: str  # of its decoder, see decoding.py
    strips: bool  # a space at the very start of a text is dropped
    spellings: list[Any]  # by id, bytes or str
    special_ids: list[int]
    eos_token_ids: list[int]
    bos_token_id: int | None
    chat_template: str | None
    max_token_bytes: int | None  # of text that one token stands for; None: any number
    infill: Marks | None = None  # for filling in, where it has the tokens


@dataclass(frozen=True)
class TokenNames:
    """Tokens as the tokenizer's files write them, which is not always what they spell."""

    tokens: list[str | None]  # by id; None: there is no such id
    num_base: int  # without those added to the vocabulary
    named: dict[str, str]  # eos_token, pad_token, …
