"""Turn prompts into tokens; refuse those that are malformed or too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import InvalidRequest, PromptTooLong, quote
from penstock.text.program import TooManyTokens
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import LoraUse, ReasoningBlock

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
COUNTED_CHARS = 1 << 14  # a text this long is always encoded, so that its refusal states the token count
MAX_CUT_TOKENS = 1 << 18  # for a text that may be truncated or is only counted; at least 4 × max_model_len


@dataclass(frozen=True)
class Encoded:
    """A prompt as tokens, with its text if known, its prefix-cache salt, the reasoning its answer may begin with, and
    the tokens that the client expects in it."""

    tokens: list[int]
    prompt: str | None = None
    salt: str = ""
    reasoning: ReasoningBlock | None = None
    prediction: tuple[int, ...] = ()
    num_dropped_messages: int = 0  # that did not fit
    loras: tuple[LoraUse, ...] = ()


@dataclass(kw_only=True)
class PromptEncoder:
    """Encodes the prompts of one model. `parse_special`: control tokens spelled in messages act as such."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    parse_special: bool = False

    def encode_messages(
        self,
        messages: Messages,
        values: Mapping[str, Any] | None = None,
        *,
        cut: bool = False,
        template: str | None = None,
    ) -> Encoded:
        """Render and encode a conversation. `values` go to the template (`template` replaces the model's); `cut`
        allows a prompt that is too long."""
        tokenizer = self.need_tokenizer("a conversation")
        with self.explain_too_long(cut):
            tokens, text = tokenizer.program.encode_chat(
                messages, values or {}, self.limit(cut), self.parse_special, template
            )
        return self.wrap_tokens(tokens, text)

    def encode(self, prompt: Prompt, *, cut: bool = False, add_special_tokens: bool = True) -> Encoded:
        """Encode a prompt. `cut` allows one that is too long; `add_special_tokens` adds what the model expects
        around plain text."""
        if isinstance(prompt, Mapping):
            return self._encode_mapping(prompt, cut)
        if isinstance(prompt, str):
            self.check_text(prompt, cut)
            with self.explain_too_long(cut):
                tokens = self.need_tokenizer("a text prompt").program.encode_upto(
                    prompt, add_special_tokens, self.limit(cut)
                )
            return self.wrap_tokens(tokens, prompt)
        return Encoded(self._check_tokens(prompt, cut))

    def check_text(self, text: str, cut: bool) -> None:
        """Refuse a text that is empty, or too long by its length alone."""
        if not text:
            raise InvalidRequest("the prompt is empty: give at least one character or token")
        self.check_length(len(text), cut)

    def check_length(self, num_chars: int, cut: bool) -> None:
        """Refuse `num_chars` characters if no tokens are long enough for them."""
        longest = self.tokenizer.max_token_bytes if self.tokenizer else None
        if longest is not None and num_chars > max(COUNTED_CHARS, self.limit(cut) * longest):
            raise self._too_many(num_chars // longest, cut)

    def limit(self, cut: bool) -> int:
        """Return the maximum number of tokens of a text."""
        return max(MAX_CUT_TOKENS, 4 * self.max_model_len) if cut else self.max_model_len

    @contextmanager
    def explain_too_long(self, cut: bool) -> Iterator[None]:
        """Turn TooManyTokens into a PromptTooLong that names the limit and the remedy."""
        try:
            yield
        except TooManyTokens as error:
            raise self._too_many(error.at_least, cut) from None

    def _too_many(self, at_least: int, cut: bool) -> PromptTooLong:
        return PromptTooLong(
            f"the text has at least {at_least} tokens; the limit is {self.limit(cut)}: send it in parts"
            if cut
            else f"the prompt has at least {at_least} tokens and {self._too_long()}",
            at_least,
            self.limit(cut),
        )

    def wrap_tokens(self, tokens: list[int], text: str) -> Encoded:
        if not tokens:
            raise InvalidRequest(f"the prompt {quote(text)} has no tokens: give some text")
        return Encoded(tokens, text)

    def _encode_mapping(self, prompt: Mapping[str, Any], cut: bool) -> Encoded:
        text, tokens, salt = (prompt.get(key) for key in PROMPT_KEYS)
        unknown = [key for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None]
        if unknown or (text is None and tokens is None):
            raise InvalidRequest(
                f"a prompt with keys {quote(list(prompt))} is not supported: give 'prompt' or "
                "'prompt_token_ids', and 'cache_salt' if you like"
            )
        if text is not None and not isinstance(text, str) or salt is not None and not isinstance(salt, str):
            raise InvalidRequest(
                f"a prompt's 'prompt' and 'cache_salt' must be strings, not {type(text).__name__} and "
                f"{type(salt).__name__}: give token ids as 'prompt_token_ids'"
            )
        ids = self._check_tokens(tokens, cut) if tokens is not None else self.encode(text or "", cut=cut).tokens
        return Encoded(ids, text, salt or "")

    def keep_beginning(self, encoded: Encoded, length: int, inner: list[int] | None = None) -> Encoded:
        """Keep the first `length` tokens, special tokens included, as for embeddings. `inner` are the text's own
        tokens, if known."""
        tokens = encoded.tokens
        if len(tokens) <= length:
            return encoded
        if encoded.prompt is None or self.tokenizer is None:
            return replace(encoded, tokens=tokens[:length])
        if inner is None:
            inner = self.tokenizer.encode(encoded.prompt, add_special_tokens=False)
        num_around = len(tokens) - len(inner)
        before = next((n for n in range(num_around + 1) if tokens[n : n + len(inner)] == inner), 0)
        after = tokens[before + len(inner) :]
        kept = tokens[:before] + inner[: max(0, length - num_around)] + after
        return replace(encoded, tokens=kept[:length])

    def _too_long(self) -> str:
        return (
            f"is longer than the model's context length of {self.max_model_len}: shorten the prompt, set "
            "truncate_prompt_tokens, or raise max_model_len as far as the model and kv_cache_tokens allow"
        )

    def _check_tokens(self, tokens: Any, cut: bool) -> list[int]:
        if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Sequence):
            raise InvalidRequest(
                f"a prompt of type {type(tokens).__name__} is not supported: give a string, a list "
                "of token ids or a dict"
            )
        if not tokens:
            raise InvalidRequest("the prompt is empty: give at least one token")
        if not cut and len(tokens) > self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and {self._too_long()}", len(tokens), self.max_model_len
            )
        self.check_ids("prompt", tokens)
        return list(tokens)

    def check_ids(self, name: str, ids: Any) -> None:
        if not ids or (list(map(type, ids)).count(int) == len(ids) and min(ids) >= 0 and max(ids) < self.vocab_size):
            return
        for id in ids:
            if type(id) is not int:
                raise InvalidRequest(f"{name}: {quote(id)} is not a token id: give integers below {self.vocab_size}")
            if not 0 <= id < self.vocab_size:
                raise InvalidRequest(
                    f"{name}: token id {id} is out of range: the vocabulary has ids 0 to {self.vocab_size - 1}"
                )

    def need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer: give token ids, or do not set skip_tokenizer_init")
        return self.tokenizer
