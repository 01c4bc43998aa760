"""Strings ⇄ ids: what everyone else needs of a model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, Protocol

from penstock.errors import InvalidModel
from penstock.text.breakers import TokenSearch
from penstock.text.decoding import Decoder, Spelling
from penstock.text.facts import TokenizerFacts, TokenNames
from penstock.text.infill import Gap, Marks, Room
from penstock.text.program import LocalProgram, byte_spellings
from penstock.text.template import Message


class Program(Protocol):
    """Runs the model's tokenizer and its chat templates, in this process or in a sandboxed one."""

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


class Tokenizer:
    """Text is made here, from what each id spells; ids and prompts are made by the program."""

    def __init__(
        self,
        program: Program,
        spelling: Spelling,
        vocab_size: int,
        special_ids: frozenset[int],
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
        chat_template: str | None,
        origin: str,
        max_token_bytes: int | None = None,
        infill: Marks | None = None,
    ) -> None:
        """`max_token_bytes` of text are the most that one token stands for; None: there may be more. `infill` has the
        tokens for filling in, where there are such."""
        self.program = program
        self.spelling = spelling
        self.vocab_size = vocab_size
        self.special_ids = special_ids
        self.eos_token_ids, self.bos_token_id = eos_token_ids, bos_token_id
        self.chat_template = chat_template
        self.origin = origin
        self.max_token_bytes = max_token_bytes
        self.infill = infill

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
    def from_facts(cls, facts: TokenizerFacts, program: Program, origin: str) -> Tokenizer:
        """For a program that runs elsewhere."""
        spelling = Spelling(
            _Elsewhere(program), Decoder(facts.kind, strips=facts.strips), known=dict(enumerate(facts.spellings))
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
        """Ids of a prompt. Special tokens written in the text are recognised; `add_special_tokens` puts around it
        what the model expects around a prompt (a chat template has already written that)."""
        return self.program.encode_upto(text, add_special_tokens, None)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; those the tokenizer lacks add nothing."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        stream = self.spelling.stream()
        return stream.push(id for id in ids if id not in hidden) + stream.finish()

    def token_text(self, id: int) -> str:
        """One id's text by itself, special or not; part of a character shows as U+FFFD."""
        return self.spelling.alone(id)

    def spellings(self) -> list[bytes]:
        """The bytes of each id wherever it stands; none for one that the tokenizer lacks."""
        return byte_spellings(self.spelling, self.vocab_size, self.origin)

    def ids_containing(self, strings: Sequence[str]) -> bytes:
        """A bit for each id whose text contains any of the strings, the lowest id first."""
        return self._search.containing(strings)

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
        """The prompt that the model's template makes of a conversation; encode it with add_special_tokens=False."""
        return self.program.render(messages, {**values, "add_generation_prompt": add_generation_prompt, "tools": tools})

    def rest(self) -> None:
        """End what runs elsewhere for it; it is started again when it is needed."""
        self.program.rest()

    @cached_property
    def _backend(self) -> Any:
        """The library's own tokenizer, where it is in this process."""
        assert isinstance(self.program, LocalProgram)
        return self.program.backend


class _Elsewhere:
    """In the place of the library's tokenizer: it knows of no further id, and decodes where the program runs."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def id_to_token(self, id: int) -> None:
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._program.decode(ids) if ids else ""


def load_tokenizer(source: str | PathLike[str] | Mapping[str, Any], origin: str = "GGUF file") -> Tokenizer:
    """Into this process, from what a checkpoint names as its tokenizer: a folder, or a GGUF file's metadata."""
    if not isinstance(source, (str, PathLike, Mapping)):
        raise InvalidModel(f"{origin}: a tokenizer is read from a folder or a GGUF file")
    return Tokenizer.of(LocalProgram.load(source, origin))
