"""A model's tokenizer as the rest of Penstock uses it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from os import PathLike
from typing import Any, Protocol

from penstock.errors import InvalidModel
from penstock.text.chat.template import Message
from penstock.text.infill import Gap, InfillTokens, Room
from penstock.text.program import LocalProgram, byte_spellings
from penstock.text.tokenizers.decoding import TokenDecoder, TokenizerInfo, TokenNames, TokenSpelling

SEPARATOR = b"\xff"  # occurs in no text
MAX_KEPT = 64  # strings and lists of them, each with its ids


class TokenSearch:
    """Full-text search over a vocabulary."""

    def __init__(self, spellings: Iterable[str | bytes]) -> None:
        """`spellings`: the text of each id, in order."""
        texts = [spelled if isinstance(spelled, bytes) else spelled.encode(errors="replace") for spelled in spellings]
        self._all = SEPARATOR.join([*texts, b""])
        self._ends = list(accumulate(len(text) + 1 for text in texts))
        self._find = lru_cache(MAX_KEPT)(self._search_one)
        self._find_any = lru_cache(MAX_KEPT)(self._search_any)

    def find(self, strings: Sequence[str]) -> bytes:
        """Return a bitmask, lowest id first, of ids whose text contains any of `strings`. Equal strings share one
        object."""
        return self._find_any(tuple(strings))

    def _search_any(self, strings: tuple[str, ...]) -> bytes:
        found = 0
        for text in strings:
            found |= self._find(text)
        return found.to_bytes(-(-len(self._ends) // 8), "little")

    def _search_one(self, text: str) -> int:
        wanted = text.encode(errors="replace")
        found = bytearray(-(-len(self._ends) // 8))
        at = self._all.find(wanted)
        while at >= 0:
            id = bisect_right(self._ends, at)
            found[id // 8] |= 1 << id % 8
            at = self._all.find(wanted, self._ends[id])
        return int.from_bytes(found, "little")


class Program(Protocol):
    """Runs the model's tokenizer and chat templates, in this process or a sandboxed one."""

    def encode_upto(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        values: Mapping[str, Any],
        max_tokens: int | None = None,
        parse_special: bool = False,
        template: str | None = None,
    ) -> tuple[list[int], str]: ...

    def encode_infill(
        self, gap: Gap, room: Room | None, add_special_tokens: bool, max_tokens: int | None
    ) -> list[int]: ...

    def encode_words(self, words: Sequence[str]) -> list[list[int]]: ...

    def render(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def describe(self) -> TokenNames: ...

    def rest(self) -> None: ...


@dataclass(eq=False)
class Tokenizer:
    """Decodes text itself, from the spelling of each id; its program encodes prompts."""

    program: Program
    spelling: TokenSpelling
    vocab_size: int
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str | None
    origin: str
    max_token_bytes: int | None = None  # the most text one token covers; None: unbounded
    infill: InfillTokens | None = None

    @classmethod
    def of(cls, program: LocalProgram) -> Tokenizer:
        vocabulary = program.vocabulary
        return cls(
            program,
            program.spelling,
            program.vocab_size,
            program.special_ids,
            vocabulary.eos_token_ids,
            vocabulary.bos_token_id,
            vocabulary.templates.get("default"),
            vocabulary.origin,
            infill=program.marks,
        )

    @classmethod
    def from_info(cls, facts: TokenizerInfo, program: Program, origin: str) -> Tokenizer:
        """Build a tokenizer whose program runs in another process."""
        spelling = TokenSpelling(
            _RemoteBackend(program),
            TokenDecoder(facts.kind, strips=facts.strips),
            known=dict(enumerate(facts.spellings)),
        )
        return cls(
            program,
            spelling,
            len(facts.spellings),
            frozenset(facts.special_ids),
            tuple(facts.eos_token_ids),
            facts.bos_token_id,
            facts.chat_template,
            origin,
            facts.max_token_bytes,
            facts.infill,
        )

    @classmethod
    def from_folder(cls, path: str | PathLike[str]) -> Tokenizer:
        return cls.of(LocalProgram.load(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], origin: str = "GGUF file") -> Tokenizer:
        return cls.of(LocalProgram.load(metadata, origin))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a prompt; special tokens spelled in it count as such. `add_special_tokens` adds what the model
        expects around a prompt (chat templates write that themselves)."""
        return self.program.encode_upto(text, add_special_tokens, None)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode ids; unknown ones add nothing."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        stream = self.spelling.stream()
        return stream.push(id for id in ids if id not in hidden) + stream.finish()

    def token_text(self, id: int) -> str:
        """Return one id's text by itself, special or not; half a character becomes U+FFFD."""
        return self.spelling.alone(id)

    def spellings(self) -> list[bytes]:
        """Return the bytes of each id; empty for ids that the tokenizer lacks."""
        return byte_spellings(self.spelling, self.vocab_size, self.origin)

    def find_ids(self, strings: Sequence[str]) -> bytes:
        """Return a bitmask, lowest id first, of ids whose text contains any of `strings`."""
        return self._search.find(strings)

    @cached_property
    def _search(self) -> TokenSearch:
        return TokenSearch(self.spelling[id] for id in range(self.vocab_size))

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **values: Any,
    ) -> str:
        """Render a conversation with the model's template; encode the result with add_special_tokens=False."""
        return self.program.render(messages, {**values, "add_generation_prompt": add_generation_prompt, "tools": tools})

    def rest(self) -> None:
        """End its sandboxed process; it restarts when needed."""
        self.program.rest()

    @cached_property
    def _backend(self) -> Any:
        """The library's tokenizer, if it is in this process."""
        assert isinstance(self.program, LocalProgram)
        return self.program.backend


class _RemoteBackend:
    """Stands in for the library's tokenizer: has no ids, and decodes in the program's process."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def id_to_token(self, id: int) -> None:
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._program.decode(ids) if ids else ""


def load_tokenizer(source: str | PathLike[str] | Mapping[str, Any], origin: str = "GGUF file") -> Tokenizer:
    """Load a tokenizer into this process from a folder or a GGUF file's metadata."""
    if not isinstance(source, (str, PathLike, Mapping)):
        raise InvalidModel(f"{origin}: a tokenizer is read from a folder or a GGUF file")
    return Tokenizer.of(LocalProgram.load(source, origin))
