"""Turn prompts and sampling parameters into requests; refuse what cannot be served before it uses any resource."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import InvalidRequest, PromptTooLong, quote
from penstock.text.prompt_encoder import Encoded, PromptEncoder
from penstock.types import BeamSearchParams, GrammarFacts, Request, SamplingParams, StructuredOutputsParams
from penstock.types.sampling import RIGHT

if TYPE_CHECKING:
    from penstock.sampling.grammar.compiler import CompiledGrammar


class Compiler(Protocol):
    """Compiles grammars; returns None if a remote engine does it."""

    def compile(self, params: StructuredOutputsParams, max_tokens: int | None = None) -> CompiledGrammar | None: ...


@dataclass(frozen=True)
class Prepared:
    """Precomputed text work of one request: bad words as ids, its grammar's trial, DRY's breaker ids."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarFacts | None = None
    dry_breakers: bytes = b""


@dataclass(kw_only=True)
class Intake(PromptEncoder):
    """Checks and builds requests for one model. `max_output_tokens` caps every answer."""

    cache_tokens: int
    generation_config: Mapping[str, Any]
    seed: int
    grammars: Compiler | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        self.longest = min(self.max_model_len, self.cache_tokens)
        self.eos_token_ids = self._eos(self.generation_config)
        self._count = 0

    def _eos(self, generation_config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the end ids of the tokenizer and of the generation config."""
        ids = generation_config.get("eos_token_id")
        named = {id for id in (ids if isinstance(ids, list) else [ids]) if type(id) is int}
        return tuple(sorted(named | set(self.tokenizer.eos_token_ids if self.tokenizer else ())))

    def request(
        self,
        encoded: Encoded,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        num_public: int = 0,
        pool: bool = False,
        prepared: Prepared | None = None,
        tenant: str = "",
    ) -> Request:
        """Build a request. `prepared` holds work done earlier; without it, it is done here. Reasoning matters if the
        answer has a grammar or a thinking budget."""
        sampling = self._sampling(params)
        tokens = self._cut(encoded.tokens, sampling)
        if isinstance(params, BeamSearchParams):
            self._check_beams(len(tokens), params)
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer: use stop_token_ids with skip_tokenizer_init=True")
        self.check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self.check_ids("logprob_token_ids", sampling.logprob_token_ids or ())
        self.check_ids("logit_bias", sampling.logit_bias or ())
        if type(priority) is not int:
            raise InvalidRequest(f"priority={quote(priority)} is not an integer: give one; lower runs first")
        max_tokens = 0 if pool else self.max_tokens(len(tokens), sampling)
        if prepared is None:
            compiled = self.compile_grammar(sampling, max_tokens)
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
            loras=encoded.loras,
            priority=priority,
            cache_priority=sampling.cache_priority,
            session=sampling.session or "",
            session_s=sampling.session_ttl if sampling.session else 0.0,
            salt=encoded.salt,
            num_public=num_public,
            tenant=tenant,
            reasoning=encoded.reasoning if _needs_guide(sampling) and not pool else None,
            prediction=encoded.prediction,
            num_truncated_tokens=len(encoded.tokens) - len(tokens),
            num_dropped_messages=encoded.num_dropped_messages,
        )

    def prepare(self, params: SamplingParams, num_prompt: int) -> object:
        """Do the slow part of a request ahead; keep the result until the request is built."""
        self.dry_breakers(params)
        room = max(1, self.longest - num_prompt)
        return self.compile_grammar(params, min(params.max_tokens or room, room))

    def compile_grammar(
        self, params: SamplingParams | BeamSearchParams | None, max_tokens: int | None = None
    ) -> CompiledGrammar | None:
        """Compile the grammar of the answer; refuse it if no answer fits `max_tokens`. Takes seconds once; cached
        while held."""
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return None
        if self.grammars is None:
            raise InvalidRequest("structured_outputs need a tokenizer: do not set skip_tokenizer_init")
        return self.grammars.compile(params.structured_outputs, max_tokens)

    def _sampling(self, params: SamplingParams | BeamSearchParams) -> SamplingParams:
        if isinstance(params, SamplingParams):
            return params.copy_checked()
        if isinstance(params, BeamSearchParams):
            return SamplingParams(max_tokens=params.max_tokens, temperature=0.0)
        raise InvalidRequest(f"sampling_params of type {type(params).__name__} are not supported: give SamplingParams")

    def _seed_for(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed % 2**64
        digest = hashlib.blake2b(f"{self.seed}:{self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _cut(self, tokens: Sequence[int], sampling: SamplingParams) -> Sequence[int]:
        """Keep the end of a prompt that may be truncated; refuse one that is too long otherwise."""
        if sampling.truncate_prompt_tokens is not None:
            most = sampling.truncate_prompt_tokens
            tokens = tokens[:most] if sampling.truncation_side == RIGHT else tokens[-most:]
        if len(tokens) > self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and {self._too_long()}", len(tokens), self.max_model_len
            )
        return tokens

    def max_tokens(self, num_prompt: int, sampling: SamplingParams) -> int:
        """Return the number of tokens asked for, as far as they fit after the prompt."""
        room = self.longest - num_prompt
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {num_prompt} tokens and leaves no room for an answer in "
                f"{self.longest}: shorten it or raise max_model_len and kv_cache_tokens",
                num_prompt,
                self.longest,
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
        """Refuse beams that do not fit in full: they are ranked at their full length."""
        if num_prompt + params.max_tokens > self.max_model_len:
            raise PromptTooLong(
                f"a prompt of {num_prompt} tokens and max_tokens={params.max_tokens} exceed the "
                f"longest sequence of {self.max_model_len}: set max_tokens to at most "
                f"{self.max_model_len - num_prompt} or raise max_model_len",
                num_prompt,
                self.max_model_len,
            )

    def _check_min_tokens(self, min_tokens: int) -> None:
        if self.max_output_tokens is not None and min_tokens > self.max_output_tokens:
            raise InvalidRequest(
                f"min_tokens={min_tokens} is more than the {self.max_output_tokens} that any answer "
                "here may have: lower it, or raise max_new_tokens in the generation config"
            )

    def _bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Tokenize each word as at the start of a text and as after a space."""
        if not sampling.bad_words:
            return ()
        program = self.need_tokenizer("bad_words").program
        return tuple(tuple(word) for word in program.encode_words(sampling.bad_words))

    def dry_breakers(self, sampling: SamplingParams) -> bytes:
        """Return a bitmask of ids whose text contains a breaker; takes milliseconds."""
        breakers = sampling.dry_sequence_breakers
        if not sampling.has_dry or not breakers:
            return b""
        if self.tokenizer is None:
            raise InvalidRequest("dry_sequence_breakers need a tokenizer: give none with skip_tokenizer_init=True")
        return self.tokenizer.find_ids(breakers)


def _needs_guide(sampling: SamplingParams) -> bool:
    """True if sampling depends on where reasoning ends."""
    return sampling.structured_outputs is not None or sampling.thinking_token_budget is not None
