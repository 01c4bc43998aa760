"""Prompts and sampling values become requests; whatever cannot be served is refused here, before it takes anything."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import InvalidRequest, PromptTooLong, shown
from penstock.text.program import TooManyTokens
from penstock.text.tokenizer import Tokenizer
from penstock.types import (
    BeamSearchParams,
    GrammarFacts,
    ReasoningBlock,
    Request,
    SamplingParams,
    StructuredOutputsParams,
)

if TYPE_CHECKING:
    from penstock.sampling.grammars import CompiledGrammar

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
COUNTED_CHARS = 1 << 14  # of a text that is encoded in any case, so that its refusal tells how many tokens it has
MAX_CUT_TOKENS = 1 << 18  # of a text that may be cut, or is only counted; four times the longest sequence if more


class Compiler(Protocol):
    """Makes grammars; one that leaves this to an engine elsewhere gives None."""

    def compile(self, asked: StructuredOutputsParams, max_tokens: int | None = None) -> CompiledGrammar | None: ...


@dataclass(frozen=True)
class Encoded:
    """A prompt as tokens; its text, where there is one; the salt within which its cached prefix is shared; and the
    reasoning that its answer may begin with."""

    tokens: list[int]
    prompt: str | None = None
    salt: str = ""
    reasoning: ReasoningBlock | None = None


@dataclass(frozen=True)
class Prepared:
    """Results of text programs for one request: its bad words as ids, its grammar's trial, and which ids break DRY's
    repetitions."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarFacts | None = None
    dry_breakers: bytes = b""


class Intake:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        cache_tokens: int,
        generation_config: Mapping[str, Any],
        seed: int,
        grammars: Compiler | None = None,
        parse_special: bool = False,
        max_output_tokens: int | None = None,
    ) -> None:
        """`parse_special`: control tokens written in messages are control tokens. `max_output_tokens` is the most that
        any answer may have, whatever is asked for."""
        self.grammars = grammars
        self.parse_special = parse_special
        self.max_output_tokens = max_output_tokens
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.longest = min(max_model_len, cache_tokens)
        self.seed = seed
        self.eos_token_ids = self._eos(generation_config)
        self._count = 0

    def _eos(self, generation_config: Mapping[str, Any]) -> tuple[int, ...]:
        """What the tokenizer and the generation config name, taken together."""
        ids = generation_config.get("eos_token_id")
        named = {id for id in (ids if isinstance(ids, list) else [ids]) if type(id) is int}
        return tuple(sorted(named | set(self.tokenizer.eos_token_ids if self.tokenizer else ())))

    def encode_messages(
        self,
        messages: Messages,
        values: Mapping[str, Any] | None = None,
        *,
        cut: bool = False,
        template: str | None = None,
    ) -> Encoded:
        """`values` are for the template, the model's own or the given one's text; `cut` says that the request allows
        a prompt that is too long."""
        tokenizer = self.need_tokenizer("a conversation")
        with self.explain_too_long(cut):
            tokens, text = tokenizer.program.encode_chat(
                messages, values or {}, self.limit(cut), self.parse_special, template
            )
        return self.encoded(tokens, text)

    def encode(self, prompt: Prompt, *, cut: bool = False, add_special_tokens: bool = True) -> Encoded:
        """`cut` says that the request allows a prompt that is too long; `add_special_tokens` puts around a plain text
        what the model expects there."""
        if isinstance(prompt, Mapping):
            return self._encode_mapping(prompt, cut)
        if isinstance(prompt, str):
            self.check_text(prompt, cut)
            with self.explain_too_long(cut):
                tokens = self.need_tokenizer("a text prompt").program.encode_upto(
                    prompt, add_special_tokens, self.limit(cut)
                )
            return self.encoded(tokens, prompt)
        return Encoded(self._checked(prompt, cut))

    def check_text(self, text: str, cut: bool) -> None:
        """Refuse a text that its length alone shows to be empty or too long."""
        if not text:
            raise InvalidRequest("the prompt is empty: give at least one character or token")
        self.check_length(len(text), cut)

    def check_length(self, num_chars: int, cut: bool) -> None:
        """Refuse so many characters if no tokens are long enough for them."""
        longest = self.tokenizer.max_token_bytes if self.tokenizer else None
        if longest is not None and num_chars > max(COUNTED_CHARS, self.limit(cut) * longest):
            raise self._too_many(num_chars // longest, cut)

    def limit(self, cut: bool) -> int:
        """Tokens that a text may have."""
        return max(MAX_CUT_TOKENS, 4 * self.max_model_len) if cut else self.max_model_len

    @contextmanager
    def explain_too_long(self, cut: bool) -> Iterator[None]:
        """Within, TooManyTokens becomes a PromptTooLong that names the limit and the remedy."""
        try:
            yield
        except TooManyTokens as error:
            raise self._too_many(error.at_least, cut) from None

    def _too_many(self, at_least: int, cut: bool) -> PromptTooLong:
        if cut:
            return PromptTooLong(
                f"the text has at least {at_least} tokens; at most {self.limit(cut)} are made of one: send it in parts"
            )
        return PromptTooLong(f"the prompt has at least {at_least} tokens; {self._too_long()}")

    def encoded(self, tokens: list[int], text: str) -> Encoded:
        if not tokens:
            raise InvalidRequest(f"the prompt {shown(text)} has no tokens: give some text")
        return Encoded(tokens, text)

    def _encode_mapping(self, prompt: Mapping[str, Any], cut: bool) -> Encoded:
        text, tokens, salt = (prompt.get(key) for key in PROMPT_KEYS)
        unknown = [key for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None]
        if unknown or (text is None and tokens is None):
            raise InvalidRequest(
                f"a prompt with keys {shown(list(prompt))} is not understood: give 'prompt' or "
                "'prompt_token_ids', and 'cache_salt' if you like"
            )
        if text is not None and not isinstance(text, str) or salt is not None and not isinstance(salt, str):
            raise InvalidRequest(
                f"a prompt's 'prompt' and 'cache_salt' must be strings, not {type(text).__name__} and "
                f"{type(salt).__name__}: give token ids as 'prompt_token_ids'"
            )
        ids = self._checked(tokens, cut) if tokens is not None else self.encode(text or "", cut=cut).tokens
        return Encoded(ids, text, salt or "")

    def beginning(self, encoded: Encoded, length: int, inner: list[int] | None = None) -> Encoded:
        """The first `length` tokens, among them what the tokenizer puts around a text: how embeddings are cut. `inner`
        are the text's own, where they are known."""
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

    def request(
        self,
        tokens: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        salt: str = "",
        num_public: int = 0,
        pool: bool = False,
        prepared: Prepared | None = None,
        tenant: str = "",
        reasoning: ReasoningBlock | None = None,
    ) -> Request:
        """`prepared` is what was done beforehand, elsewhere; without it, it is done here. `reasoning` may stand before
        the answer, and counts where the answer must match something or the reasoning has a budget."""
        sampling = self._sampling(params)
        tokens = self._cut(tokens, sampling)
        if isinstance(params, BeamSearchParams):
            self._check_beams(len(tokens), params)
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer: use stop_token_ids with skip_tokenizer_init=True")
        self.check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self.check_ids("logit_bias", sampling.logit_bias or ())
        if type(priority) is not int:
            raise InvalidRequest(f"priority={shown(priority)} is not understood: give an integer, lower runs first")
        max_tokens = 0 if pool else self.max_tokens(len(tokens), sampling)
        if prepared is None:
            compiled = self.compiled(sampling, max_tokens)
            prepared = Prepared(
                self._bad_words(sampling),
                compiled.facts if compiled else None,
                dry_breakers=self.dry_breakers(sampling),
            )
        self._count += 1
        return Request(
            id=f"r{self._count}",
            tokens=tuple(tokens),
            sampling=sampling,
            beam=params if isinstance(params, BeamSearchParams) else None,
            pool=pool,
            max_tokens=max_tokens,
            seed=self._seed_for(sampling),
            eos_token_ids=self.eos_token_ids,
            bad_words=prepared.bad_words,
            dry_breakers=prepared.dry_breakers,
            grammar=prepared.grammar,
            priority=priority,
            salt=salt,
            num_public=num_public,
            tenant=tenant,
            reasoning=reasoning if _steers(sampling) and not pool else None,
        )

    def prepare(self, params: SamplingParams, num_prompt: int) -> object:
        """All that may take long about a request, done beforehand; hold the result until it is taken in."""
        self.dry_breakers(params)
        room = max(1, self.longest - num_prompt)
        return self.compiled(params, min(params.max_tokens or room, room))

    def compiled(
        self, params: SamplingParams | BeamSearchParams | None, max_tokens: int | None = None
    ) -> CompiledGrammar | None:
        """The grammar that the answer must match, refused where no answer of `max_tokens` can. This may take seconds,
        and from then on nothing for as long as it is held."""
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return None
        if self.grammars is None:
            raise InvalidRequest("structured_outputs need a tokenizer: do not set skip_tokenizer_init")
        return self.grammars.compile(params.structured_outputs, max_tokens)

    def _sampling(self, params: SamplingParams | BeamSearchParams) -> SamplingParams:
        if isinstance(params, SamplingParams):
            return params.settled()
        if isinstance(params, BeamSearchParams):
            return SamplingParams(max_tokens=params.max_tokens, temperature=0.0)
        raise InvalidRequest(f"sampling_params of type {type(params).__name__} are not understood: give SamplingParams")

    def _seed_for(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed % 2**64
        digest = hashlib.blake2b(f"{self.seed}:{self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _cut(self, tokens: Sequence[int], sampling: SamplingParams) -> Sequence[int]:
        """Keep the end of a prompt where the request allows it to be cut; otherwise refuse one that is too long."""
        if sampling.truncate_prompt_tokens is not None:
            tokens = tokens[-sampling.truncate_prompt_tokens :]
        if len(tokens) > self.max_model_len:
            raise PromptTooLong(f"the prompt has {len(tokens)} tokens; {self._too_long()}")
        return tokens

    def _too_long(self) -> str:
        return (
            f"the longest sequence is {self.max_model_len}: shorten the prompt, set truncate_prompt_tokens, or "
            "raise max_model_len, which the cache's kv_cache_tokens bounds"
        )

    def max_tokens(self, num_prompt: int, sampling: SamplingParams) -> int:
        """As many as are asked for and fit after a prompt."""
        room = self.longest - num_prompt
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {num_prompt} tokens and leaves no room for an answer in "
                f"{self.longest}: shorten it or raise max_model_len and kv_cache_tokens"
            )
        if self.max_output_tokens is not None:
            room = min(room, self.max_output_tokens)
            self._check_min_tokens(sampling.min_tokens)
        if sampling.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens={sampling.min_tokens} is more than the {room} that fit after this "
                f"prompt of {num_prompt}: lower it or raise max_model_len"
            )
        if sampling.max_tokens is None or num_prompt + sampling.max_tokens > self.max_model_len:
            return room
        return min(sampling.max_tokens, self.max_output_tokens or sampling.max_tokens)

    def _check_beams(self, num_prompt: int, params: BeamSearchParams) -> None:
        """Beams are ranked at their full length."""
        if num_prompt + params.max_tokens > self.max_model_len:
            raise PromptTooLong(
                f"a prompt of {num_prompt} tokens and max_tokens={params.max_tokens} exceed the "
                f"longest sequence of {self.max_model_len}: set max_tokens to at most "
                f"{self.max_model_len - num_prompt} or raise max_model_len"
            )

    def _check_min_tokens(self, min_tokens: int) -> None:
        if self.max_output_tokens is not None and min_tokens > self.max_output_tokens:
            raise InvalidRequest(
                f"min_tokens={min_tokens} is more than the {self.max_output_tokens} that any answer "
                "here may have: lower it, or raise max_new_tokens in the generation config"
            )

    def _bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelt at the start of a text and after a space."""
        if not sampling.bad_words:
            return ()
        program = self.need_tokenizer("bad_words").program
        return tuple(tuple(word) for word in program.encode_words(sampling.bad_words))

    def dry_breakers(self, sampling: SamplingParams) -> bytes:
        """Ids whose text contains a breaker, as bits; looked for in what ids spell, which takes milliseconds."""
        breakers = sampling.dry_sequence_breakers
        if not sampling.has_dry or not breakers:
            return b""
        if self.tokenizer is None:
            raise InvalidRequest("dry_sequence_breakers need a tokenizer: give none with skip_tokenizer_init=True")
        return self.tokenizer.ids_containing(breakers)

    def _checked(self, tokens: Any, cut: bool) -> list[int]:
        if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Sequence):
            raise InvalidRequest(
                f"a prompt of type {type(tokens).__name__} is not understood: give a string, a list "
                "of token ids or a dict"
            )
        if not tokens:
            raise InvalidRequest("the prompt is empty: give at least one token")
        if not cut and len(tokens) > self.max_model_len:
            raise PromptTooLong(f"the prompt has {len(tokens)} tokens; {self._too_long()}")
        self.check_ids("prompt", tokens)
        return list(tokens)

    def check_ids(self, name: str, ids: Any) -> None:
        if not ids or (list(map(type, ids)).count(int) == len(ids) and min(ids) >= 0 and max(ids) < self.vocab_size):
            return
        for id in ids:
            if type(id) is not int:
                raise InvalidRequest(f"{name}: {shown(id)} is no token id: give integers below {self.vocab_size}")
            if not 0 <= id < self.vocab_size:
                raise InvalidRequest(
                    f"{name}: token id {id} is out of range: the vocabulary has ids 0 to {self.vocab_size - 1}"
                )

    def need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer: give token ids, or do not set skip_tokenizer_init")
        return self.tokenizer


def _steers(sampling: SamplingParams) -> bool:
    """True if sampling depends on where reasoning ends."""
    return sampling.structured_outputs is not None or sampling.thinking_token_budget is not None
