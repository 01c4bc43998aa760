"""A model's tokenizer and chat templates, run in this process.

They come with the model and are not trusted to end or to stay small. Servers run them in a sandboxed process
(`penstock/sandbox`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import InvalidModel, InvalidRequest
from penstock.text.chat.control import ControlTokens
from penstock.text.chat.template import ChatTemplate, Message
from penstock.text.infill import NO_INFILL, Gap, Room, find_infill_tokens, make_prompt
from penstock.text.tokenizers import folder, gguf
from penstock.text.tokenizers.chunks import TextChunker
from penstock.text.tokenizers.decoding import TokenDecoder, TokenizerInfo, TokenNames, TokenSpelling
from penstock.text.tokenizers.vocabulary import Vocabulary, check_expansion, refuse_damage

PROBE_CHARS = 16  # per allowed token: longer texts are probed by a prefix first
MAX_PROBE_CHARS = 1 << 20
CUT_TOKENS = 64  # bound on the extra tokens of a prefix over the same part of the whole text
Values = Mapping[str, Any]


class TooManyTokens(InvalidRequest):
    """A text has `at_least` tokens, more than allowed."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has {at_least} tokens or more")
        self.at_least = at_least


class LocalProgram:
    """Runs the `tokenizers` library and Jinja in this process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.backend = vocabulary, vocabulary.backend
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext  # entered around every rendering
        self._templates: dict[str, ChatTemplate] = {}
        with refuse_damage(vocabulary.origin):
            check_expansion(self.backend)
            added = self.backend.get_added_tokens_decoder()
            self.special_ids = frozenset(id for id, token in added.items() if token.special)
            self.spelling = TokenSpelling(
                self.backend, TokenDecoder.of(self.backend), vocabulary.aliases, frozenset(added)
            )
            self.backend.encode("a")  # shows some kinds of damage
            self.marks = find_infill_tokens(self.backend, vocabulary.infill)
        marks = [self.backend.id_to_token(id) or "" for id in self.marks.ids] if self.marks else []
        self._control = ControlTokens(self.backend, [*vocabulary.templates.values(), *marks], lambda: self.vocab_size)
        self._chunker = TextChunker(self.backend, self.spelling.decoder.kind)

    @classmethod
    def load(
        cls, source: str | PathLike[str] | Mapping[str, Any], origin: str = "GGUF file", template: str | None = None
    ) -> LocalProgram:
        """Load from a folder or a GGUF file's metadata; `template` replaces its chat templates."""
        vocabulary = (
            gguf.read_vocabulary(source, origin)
            if isinstance(source, Mapping)
            else folder.read_vocabulary(Path(source))
        )
        return cls(vocabulary if template is None else vocabulary.with_template(template))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        if self.vocabulary.num_ids is not None:
            return self.vocabulary.num_ids
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def facts(self) -> TokenizerInfo:
        """Return everything about the tokenizer but its code."""
        with refuse_damage(self.vocabulary.origin):
            spellings = [self.spelling[id] for id in range(self.vocab_size)]
            decoder = self.spelling.decoder
            longest = self._chunker.max_token_bytes(max((len(_bytes(one)) for one in spellings), default=0))
        if "default" in self.vocabulary.templates:
            self._template("default")  # refuse the model if its template does not compile
        return TokenizerInfo(
            decoder.kind,
            decoder.strips,
            spellings,
            sorted(self.special_ids),
            list(self.vocabulary.eos_token_ids),
            self.vocabulary.bos_token_id,
            self.vocabulary.templates.get("default"),
            longest,
            self.marks,
        )

    def describe(self) -> TokenNames:
        vocab = self.backend.get_vocab(with_added_tokens=True)
        tokens: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for token, id in vocab.items():
            tokens[id] = token
        return TokenNames(tokens, self.backend.get_vocab_size(with_added_tokens=False), dict(self.vocabulary.named))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text; special tokens spelled in it count as such. `add_special_tokens` adds what the model
        expects around a prompt (chat templates write that themselves)."""
        return self.encode_upto(text, add_special_tokens, None)

    def encode_upto(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        """Like `encode`; refuse a text as soon as it surely has more than `max_tokens`."""
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt must be a string, not {type(text).__name__}")
        affixes = self.vocabulary.affixes
        try:
            with refuse_damage(self.vocabulary.origin):
                ids = self._encode(text, add_special_tokens and affixes is None, max_tokens)
        except InvalidModel:
            check_characters(text)
            raise
        return [*affixes[0], *ids, *affixes[1]] if add_special_tokens and affixes is not None else ids

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        if max_tokens is not None:
            self._probe(text, max_tokens)
        if add_special_tokens and not self._chunker.adds_nothing:
            return self._ids(text, True)
        ids: list[int] = []
        for part in self._chunker.parts(text):
            ids += self._ids(part, False)
            if max_tokens is not None and len(ids) > max_tokens + CUT_TOKENS:
                raise TooManyTokens(len(ids) - CUT_TOKENS)
        return ids

    def _probe(self, text: str, max_tokens: int) -> None:
        """Encode growing prefixes of a long text, each twice as long, to refuse it early."""
        length = PROBE_CHARS * max_tokens
        while length < len(text) and length <= MAX_PROBE_CHARS:
            count = len(self._ids(text[:length], False)) - CUT_TOKENS
            if count > max_tokens:
                raise TooManyTokens(count)
            length *= 2

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.vocabulary.matcher is not None:
            return self.vocabulary.matcher.find_ids(self.backend, text)
        # unlike `encode`, this releases the GIL
        found = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(found[0].ids)

    def encode_infill(self, gap: Gap, room: Room | None, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        """Encode a fill-in-the-middle prompt; its texts never spell special tokens. Without `room` nothing is cut,
        and more than `max_tokens` are refused."""
        if self.marks is None:
            raise InvalidRequest(NO_INFILL)
        with self._control.plain():
            ids = make_prompt(
                self.marks,
                gap,
                lambda text: self.encode_upto(text, False, max_tokens),
                self._begin() if add_special_tokens else (),
                room,
                self.spelling.decoder.strips,
            )
        if max_tokens is not None and len(ids) > max_tokens:
            raise TooManyTokens(len(ids))
        return ids

    def _begin(self) -> Sequence[int]:
        """Return the ids that begin every prompt."""
        if self.vocabulary.affixes is not None:
            return self.vocabulary.affixes[0]
        ids, (inner, *_) = self._ids("a", True), self._ids("a", False)
        return ids[: ids.index(inner)]

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Encode each word as at the start of a text and as after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for spelling in (word, " " + word.lstrip()):
                ids = tuple(self.encode(spelling, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return [list(ids) for ids in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with the tokenizer's own decoder, special tokens included."""
        with refuse_damage(self.vocabulary.origin):
            return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def spell(self, ids: Sequence[int], alone: bool) -> list[str]:
        """Return the text of each id alone, or of all together, special tokens included."""
        if alone:
            return [self.spelling.alone(id) for id in ids]
        stream = self.spelling.stream()
        return [stream.push(ids) + stream.finish()]

    def rest(self) -> None:
        """Do nothing: no other process runs for it."""

    def render(self, messages: Sequence[Message], values: Values, template: ChatTemplate | None = None) -> str:
        """Render a conversation with the model's template or `template`. `values` are its variables, such as `tools`
        and `add_generation_prompt` (true by default)."""
        given = {**self.vocabulary.named, **values}
        tools, begins = given.pop("tools", None), given.pop("add_generation_prompt", True)
        name = "tool_use" if tools and "tool_use" in self.vocabulary.templates else "default"
        template = template or self._template(name)
        with self.guard():
            return template.render(messages, given, begins, tools)

    def encode_chat(
        self,
        messages: Sequence[Message],
        values: Values,
        max_tokens: int | None = None,
        parse_special: bool = False,
        template: str | None = None,
    ) -> tuple[list[int], str]:
        """Return a conversation's ids and prompt. Control tokens spelled in messages are plain text unless
        `parse_special`. `template` is a request's own."""
        given = None if template is None else self._compile_template(template)

        def render(said: tuple[Sequence[Message], Values]) -> str:
            return self.render(*said, template=given)

        text, hidden = (
            (render((messages, values)), None)
            if parse_special
            else self._control.read((list(messages), dict(values)), render)
        )
        if hidden is None:
            return self.encode_upto(text, False, max_tokens), text
        with self._control.use_hidden_names():
            return self._control.shown_ids(self.encode_upto(hidden, False, max_tokens)), text

    def _compile_template(self, source: str) -> ChatTemplate:
        try:
            with self.guard():
                return ChatTemplate(source, "this request")
        except InvalidModel as error:
            raise InvalidRequest(f"chat_template cannot be read: {error.__cause__}") from None

    def _template(self, name: str) -> ChatTemplate:
        if name not in self._templates:
            source = self.vocabulary.templates.get(name)
            if source is None:
                raise InvalidRequest(
                    f"{self.vocabulary.origin} has no chat template; use generate with a plain prompt, "
                    "or give one with --chat-template"
                )
            self._templates[name] = ChatTemplate(source, self.vocabulary.origin)
        return self._templates[name]


def byte_spellings(spelling: TokenSpelling, size: int, origin: str) -> list[bytes]:
    """Return the bytes of each id; empty for ids that the tokenizer lacks."""
    if spelling.decoder.kind == "pairs":
        raise InvalidRequest(
            f"{origin}: structured_outputs are not supported, since a token's text depends on its "
            "neighbours: use a model with byte-level BPE or SentencePiece with "
            "byte fallback"
        )
    return [_bytes(spelling[id]) for id in range(size)]


def _bytes(spelled: str | bytes) -> bytes:
    return spelled if isinstance(spelled, bytes) else spelled.encode()


def check_characters(text: str) -> None:
    """Refuse lone surrogates: no tokenizer can encode them."""
    for at, char in enumerate(text):
        if "\ud800" <= char <= "\udfff":
            raise InvalidRequest(
                f"the prompt has a lone surrogate (U+{ord(char):04X}) at position "
                f"{at}; remove it or decode the text with errors='replace'"
            )
