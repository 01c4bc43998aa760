"""Text to ids and ids to text, whatever files the tokenizer came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import InvalidModel, InvalidRequest
from penstock.text import folder, gguf
from penstock.text.decoding import Decoder, Spelling
from penstock.text.template import ChatTemplate, Message
from penstock.text.vocabulary import Vocabulary, refusing


class Tokenizer:
    """What the engine needs of a tokenizer; the work is done by the `tokenizers` library."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._templates: dict[str, ChatTemplate] = {}
        with refusing(vocabulary.origin):
            added = self._backend.get_added_tokens_decoder()
            self.special_ids = frozenset(id for id, token in added.items() if token.special)
            self.spelling = Spelling(self._backend, Decoder.of(self._backend), vocabulary.aliases, frozenset(added))
            self._backend.encode("a")      # some damage shows only here
        self.eos_token_ids = vocabulary.eos_token_ids
        self.bos_token_id = vocabulary.bos_token_id
        self.chat_template = vocabulary.templates.get("default")

    @classmethod
    def from_folder(cls, path: str | PathLike[str]) -> Tokenizer:
        return cls(folder.read_vocabulary(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], origin: str = "GGUF file") -> Tokenizer:
        return cls(gguf.read_vocabulary(metadata, origin))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        if self._vocabulary.num_ids is not None:
            return self._vocabulary.num_ids
        return max(self._backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt. Special tokens written in the text are recognised; `add_special_tokens` puts around it
        what the model expects around a prompt (a chat template has already written that)."""
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt must be a string, not {type(text).__name__}")
        affixes = self._vocabulary.affixes
        try:
            with refusing(self._vocabulary.origin):
                ids = self._backend.encode(text, add_special_tokens=add_special_tokens and affixes is None).ids
        except InvalidModel:
            _check_characters(text)
            raise
        if add_special_tokens and affixes is not None:
            return [*affixes[0], *ids, *affixes[1]]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; those the tokenizer lacks add nothing."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        stream = self.spelling.stream()
        return stream.push(id for id in ids if id not in hidden) + stream.finish()

    def token_text(self, id: int) -> str:
        """One id's text by itself, special or not; part of a character shows as U+FFFD."""
        return self.spelling.alone(id)

    def spellings(self) -> list[bytes]:
        """What each id spells wherever it stands; nothing for one that the tokenizer lacks."""
        if self.spelling.decoder.kind == "pairs":
            raise InvalidRequest(f"{self._vocabulary.origin}: what a token of this tokenizer spells depends on its "
                                 "neighbours, so structured_outputs cannot be kept: use a model with byte-level BPE or "
                                 "SentencePiece with byte fallback")
        found = [self.spelling[id] for id in range(self.vocab_size)]
        return [spelled if isinstance(spelled, bytes) else spelled.encode() for spelled in found]

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True,
                            tools: Sequence[Mapping[str, Any]] | None = None, **values: Any) -> str:
        """The prompt that the model's template makes of a conversation; encode it with add_special_tokens=False."""
        template = self._template("tool_use" if tools and "tool_use" in self._vocabulary.templates else "default")
        return template.render(messages, {**self._vocabulary.named, **values}, add_generation_prompt, tools)

    def _template(self, name: str) -> ChatTemplate:
        if name not in self._templates:
            source = self._vocabulary.templates.get(name)
            if source is None:
                raise InvalidRequest(f"{self._vocabulary.origin} has no chat template, so it is no chat model; use "
                                     "generate with a plain prompt")
            self._templates[name] = ChatTemplate(source, self._vocabulary.origin)
        return self._templates[name]


def _check_characters(text: str) -> None:
    for at, char in enumerate(text):
        if "\ud800" <= char <= "\udfff":
            raise InvalidRequest(f"the prompt has half a character (U+{ord(char):04X}, a lone surrogate) at position "
                                 f"{at}; remove it or decode the text with errors='replace'")


def load_tokenizer(source: str | PathLike[str] | Mapping[str, Any], origin: str = "GGUF file") -> Tokenizer:
    """From what a checkpoint names as its tokenizer: a folder, or the metadata of a GGUF file."""
    if isinstance(source, Mapping):
        return Tokenizer.from_gguf(source, origin)
    return Tokenizer.from_folder(source)
