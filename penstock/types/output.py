"""Outputs: what a step adds, what a stream yields, and the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import msgspec

from penstock.types.applied import Applied, DraftCount


class Logprob(NamedTuple):
    """Log probability and rank (1 = likeliest) of one token under the raw distribution. A plain tuple: there may be
    a million, and the garbage collector untracks such tuples."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # one position: the sampled (or prompt) token first, then the likeliest ones


class Delta(msgspec.Struct, omit_defaults=True, gc=False):
    """The tokens that one step added to one sibling of a request. Immutable.

    A struct: it is sent between processes for every token, with the fields that are set alone."""

    request_id: str
    sibling: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    embedding: tuple[float, ...] | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    cumulative_logprob: float | None = None  # beam search: set with the finish
    error: str | None = None
    unfit: bool = False  # the request's own constraints are at fault
    complete: bool = False  # the last token is text: it completes all that the grammar allows
    forced_closing: bool = False  # a token was replaced to end the answer validly within its budget
    mu: float | None = None  # mirostat's, after the last token, to continue in another engine
    drafts: tuple[DraftCount, ...] = ()  # draft tokens that were verified

    @property
    def is_token(self) -> bool:
        """True for one token and nothing else."""
        return (
            len(self.tokens) == 1
            and self.finish_reason is None
            and self.error is None
            and self.mu is None
            and self.prompt_logprobs is None
            and not (self.logprobs or self.forced_closing or self.drafts)
        )


@dataclass
class CompletionOutput:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # stop, length, error
    stop_reason: int | str | None = None  # the stop string or token id; None after an EOS token
    forced_closing: bool = False  # tokens were replaced to end it validly within its budget
    relaxed: tuple[str, ...] = ()  # schema keywords that were not enforced, each with its path

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Arrival, start and end of a request in seconds since the epoch, with vLLM's names."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def first_token_latency(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt with its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None  # the reason for finish_reason="error"
    metrics: RequestMetrics | None = None
    applied: tuple[Applied, ...] = ()  # the ledger, see docs/ledger.md
    lora_request: ClassVar[None] = None  # vLLM's: there are no adapters and no encoder
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None

    @property
    def exact(self) -> bool:
        """True if the same request gives the same bits again."""
        return all(one.exact for one in self.applied)


class StreamDelta(msgspec.Struct, frozen=True, gc=False):
    """One item of a stream: the new text and tokens of one answer."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # with the first tokens, if asked for
    forced_closing: bool = False  # from here on; see CompletionOutput
    relaxed: tuple[str, ...] = ()  # with the last of an answer; see CompletionOutput
    applied: tuple[Applied, ...] = ()  # with the last of a request; see RequestOutput


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0


def cosine(first: Sequence[float], two: Sequence[float]) -> float:
    dot = math.fsum(a * b for a, b in zip(first, two))
    norms = math.sqrt(math.fsum(a * a for a in first) * math.fsum(b * b for b in two))
    return dot / norms if norms else 0.0
