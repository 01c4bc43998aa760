"""Prompts and sampling values become requests; whatever cannot be served is refused here, before it takes anything."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidRequest
from penstock.text.tokenizer import Tokenizer
from penstock.types import BeamSearchParams, Request, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """What the model's authors recommend; a model that says do_sample=false is greedy."""
    values = {name: generation_config[name] for name in DEFAULTS
              if isinstance(generation_config.get(name), (int, float)) and generation_config[name] is not False}
    if generation_config.get("do_sample") is False:
        values = {"temperature": 0.0}
    try:
        return SamplingParams(max_tokens=None, **values)
    except InvalidRequest:
        return SamplingParams(max_tokens=None)


class Intake:
    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int, cache_tokens: int,
                 generation_config: Mapping[str, Any], seed: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.longest = min(max_model_len, cache_tokens)
        self.seed = seed
        self.eos_token_ids = self._eos(generation_config)
        self._count = 0

    def _eos(self, generation_config: Mapping[str, Any]) -> tuple[int, ...]:
        if self.tokenizer is not None:
            return tuple(sorted(self.tokenizer.eos_token_ids))
        ids = generation_config.get("eos_token_id")
        return tuple(id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int))

    def encode_messages(self, messages: Messages, add_generation_prompt: bool = True, **values: Any) -> list[int]:
        tokenizer = self._need_tokenizer("a conversation")
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **values)
        return tokenizer.encode(text, add_special_tokens=False)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its tokens."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return None, self._checked(prompt["prompt_token_ids"])
            if "prompt" in prompt:
                return self.encode(prompt["prompt"])
            raise InvalidRequest(f"a prompt with keys {sorted(prompt)} is not understood: give 'prompt' or "
                                 "'prompt_token_ids'")
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty: give at least one character or token")
            return prompt, self._need_tokenizer("a text prompt").encode(prompt)
        return None, self._checked(prompt)

    def request(self, tokens: Sequence[int], params: SamplingParams | BeamSearchParams, *, priority: int = 0,
                salt: str = "", pool: bool = False) -> Request:
        sampling = params if isinstance(params, SamplingParams) else SamplingParams(
            max_tokens=params.max_tokens, temperature=0.0, detokenize=self.tokenizer is not None)
        beam = params if isinstance(params, BeamSearchParams) else None
        tokens = self._cut(tokens, sampling)
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer: use stop_token_ids with skip_tokenizer_init=True")
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_ids("logit_bias", sampling.logit_bias or ())
        self._count += 1
        return Request(id=f"r{self._count}", tokens=tuple(tokens), sampling=sampling, beam=beam, pool=pool,
                       max_tokens=0 if pool else self._max_tokens(len(tokens), sampling),
                       seed=self._seed_for(sampling), eos_token_ids=self.eos_token_ids,
                       bad_words=self._bad_words(sampling), priority=priority, salt=salt)

    def _seed_for(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed % 2**64
        digest = hashlib.blake2b(f"{self.seed}:{self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _cut(self, tokens: Sequence[int], sampling: SamplingParams) -> Sequence[int]:
        """Keep the end of a prompt where the request allows it to be cut; otherwise refuse one that is too long."""
        if sampling.truncate_prompt_tokens is not None:
            tokens = tokens[-sampling.truncate_prompt_tokens:]
        if len(tokens) > self.max_model_len:
            raise InvalidRequest(f"the prompt has {len(tokens)} tokens, the longest sequence is {self.max_model_len}: "
                                 "shorten it, set truncate_prompt_tokens, or raise max_model_len")
        return tokens

    def _max_tokens(self, num_prompt: int, sampling: SamplingParams) -> int:
        room = self.longest - num_prompt
        if room < 1:
            raise InvalidRequest(f"the prompt has {num_prompt} tokens and leaves no room for an answer in "
                                 f"{self.longest}: shorten it or raise max_model_len and kv_cache_tokens")
        if sampling.max_tokens is None:
            return room
        if num_prompt + sampling.max_tokens > self.max_model_len:
            raise InvalidRequest(f"a prompt of {num_prompt} tokens and max_tokens={sampling.max_tokens} exceed the "
                                 f"longest sequence of {self.max_model_len}: set max_tokens to at most "
                                 f"{self.max_model_len - num_prompt} or raise max_model_len")
        return sampling.max_tokens

    def _bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelt at the start of a text and after a space."""
        if not sampling.bad_words:
            return ()
        tokenizer = self._need_tokenizer("bad_words")
        words: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            for spelling in (word, " " + word.lstrip()):
                ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
                if ids:
                    words[ids] = None
        return tuple(words)

    def _checked(self, tokens: Any) -> list[int]:
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sequence):
            raise InvalidRequest(f"a prompt of type {type(tokens).__name__} is not understood: give a string, a list "
                                 "of token ids or a dict")
        if not tokens:
            raise InvalidRequest("the prompt is empty: give at least one token")
        self._check_ids("prompt", tokens)
        return list(tokens)

    def _check_ids(self, name: str, ids: Any) -> None:
        for id in ids:
            if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < self.vocab_size:
                raise InvalidRequest(f"{name}: token id {id!r} is out of range: the vocabulary has ids 0 to "
                                     f"{self.vocab_size - 1}")

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer: give token ids, or do not set skip_tokenizer_init")
        return self.tokenizer
