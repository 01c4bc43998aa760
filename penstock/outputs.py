"""Outputs of requests, under vLLM's module name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.text.answers import Collector
from penstock.types import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    StreamDelta,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "OutputStream",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]


@dataclass
class ScoringOutput:
    score: float


@dataclass
class ScoringRequestOutput:
    """The score of a pair of texts; its token ids are those of the first, then the second."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(eq=False)
class PoolingOutput:
    data: Tensor


@dataclass(eq=False)
class PoolingRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int = 0


class OutputStream:
    """Turns one request's deltas into outputs of its `output_kind`, under the caller's own id."""

    def __init__(self, id: str, collector: Collector) -> None:
        self._id, self._collector = id, collector
        self._kind = collector.request.sampling.output_kind
        self._answers = {index: CompletionOutput(index) for index in range(collector.request.sampling.n)}
        self._fresh: dict[int, CompletionOutput] = {}
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached = 0

    @property
    def finished(self) -> bool:
        return all(answer.finished() for answer in self._answers.values())

    def push(self, delta: StreamDelta) -> None:
        if delta.finish_reason == "abort":
            self._abort()
            return
        self._num_cached = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = list(delta.prompt_logprobs)
        fresh = self._fresh.setdefault(delta.index, CompletionOutput(delta.index))
        for answer in (self._answers[delta.index], fresh):
            _extend(answer, delta, self._collector.request.sampling.logprobs is not None)
        fresh.cumulative_logprob = self._answers[delta.index].cumulative_logprob

    def _abort(self) -> None:
        for index, answer in self._answers.items():
            if not answer.finished():
                answer.finish_reason = "abort"
                self._fresh.setdefault(index, CompletionOutput(index)).finish_reason = "abort"

    def take(self) -> RequestOutput | None:
        """Return an output with all that is new since the last; None if nothing is."""
        fresh, self._fresh = self._fresh, {}
        if not fresh or self._kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        if self._kind is RequestOutputKind.DELTA:
            outputs = [fresh[index] for index in sorted(fresh)]
        else:
            outputs = [_copy(answer) for answer in self._answers.values()]
        request = self._collector.request
        return RequestOutput(
            self._id,
            self._collector.prompt,
            list(request.tokens),
            outputs,
            self._prompt_logprobs,
            self.finished,
            self._num_cached,
            self._collector.error,
            self._collector.metrics,
            self._collector.list_applied() if self.finished else (),
        )


def _copy(answer: CompletionOutput) -> CompletionOutput:
    """Copy the output's present state: the answer keeps growing."""
    return replace(
        answer, token_ids=list(answer.token_ids), logprobs=None if answer.logprobs is None else list(answer.logprobs)
    )


def _extend(answer: CompletionOutput, delta: StreamDelta, with_logprobs: bool) -> None:
    answer.text += delta.text
    answer.token_ids.extend(delta.token_ids)
    if with_logprobs:
        answer.logprobs = answer.logprobs or []
        answer.logprobs.extend(delta.logprobs)
        new = sum(next(iter(position.values())).logprob for position in delta.logprobs)
        answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + new
    answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
    answer.forced_closing |= delta.forced_closing
    answer.relaxed = delta.relaxed or answer.relaxed
