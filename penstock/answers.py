"""Tokens become text and finished outputs: one collector per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.text.detokenizer import Detokenizer
from penstock.text.stop import StopStrings
from penstock.text.tokenizer import Tokenizer
from penstock.types import CompletionOutput, Delta, Logprob, Request, RequestOutput, StreamDelta, TokenLogprobs

CONTEXT_TOKENS = 16      # of the prompt: enough to continue a character or a word that the prompt broke off


class Answer:
    """One sibling: its tokens so far, and the text that may be shown of them."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        sampling = request.sampling
        self.output = CompletionOutput(index, logprobs=None if sampling.logprobs is None else [])
        self.score = 0.0
        self._min_tokens = sampling.min_tokens
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None and sampling.detokenize:
            self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens, request.tokens[-CONTEXT_TOKENS:])
        self._stop = StopStrings(tuple(sampling.stop or ()), sampling.include_stop_str_in_output)

    @property
    def stopped(self) -> bool:
        """A stop string ended the answer; the engine does not know of it."""
        return self._stop.matched is not None

    def push(self, delta: Delta) -> tuple[str, int]:
        """Take in a delta: the new text, and how many of its tokens belong to the answer."""
        text, taken = "", 0
        for token in delta.tokens:
            taken += 1
            self.output.token_ids.append(token)
            if self._detokenizer is not None:
                watch = len(self.output.token_ids) > self._min_tokens
                text += self._stop.push(self._detokenizer.push((token,)), watch)
                if self.stopped:
                    break
        self._take_logprobs(delta.logprobs[:taken])
        if self.stopped:
            self.output.finish_reason, self.output.stop_reason = "stop", self._stop.matched
        elif delta.finish_reason:
            if self._detokenizer is not None:
                text += self._stop.push(self._detokenizer.finish()) + self._stop.finish()
            self.output.finish_reason, self.output.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.cumulative_logprob is not None:
            self.output.cumulative_logprob = delta.cumulative_logprob
        self.output.text += text
        return text, taken

    def _take_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        for position in logprobs:
            self.score += next(iter(position.values())).logprob
            if self.output.logprobs is not None:
                self.output.logprobs.append(self.named(position))
                self.output.cumulative_logprob = self.score

    def named(self, position: Mapping[int, Logprob]) -> TokenLogprobs:
        """With each token's text."""
        if self._tokenizer is None:
            return dict(position)
        return {id: replace(logprob, decoded_token=self._tokenizer.token_text(id))
                for id, logprob in position.items()}


class Collector:
    """A request and its answers."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.prompt = prompt
        self.error: str | None = None
        self.embedding: tuple[float, ...] | None = None
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached = 0
        self._answers: dict[int, Answer] = {}
        self._open = request.num_siblings

    @property
    def finished(self) -> bool:
        return self._open <= 0

    def push(self, delta: Delta) -> tuple[StreamDelta, bool]:
        """The stream's next item, and whether the engine must end this sibling."""
        answer = self._answers.get(delta.sibling)
        if answer is None:
            answer = self._answers[delta.sibling] = Answer(self.request, delta.sibling, self._tokenizer)
        if delta.sibling == 0:
            self._num_cached = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = [answer.named(p) if p is not None else None for p in delta.prompt_logprobs]
        self.error = delta.error or self.error
        self.embedding = delta.embedding or self.embedding
        text, taken = answer.push(delta)
        if answer.output.finish_reason:
            self._open -= 1
        item = StreamDelta(self.request.id, delta.sibling, text, delta.tokens[:taken], delta.logprobs[:taken],
                           answer.output.finish_reason, answer.output.stop_reason, len(self.request.tokens),
                           self._num_cached)
        return item, answer.stopped and not delta.finish_reason

    def output(self) -> RequestOutput:
        answers = [self._answers[sibling] for sibling in sorted(self._answers)]
        keep = self.request.sampling.n
        if not self.request.beam and len(answers) > keep:
            answers = sorted(answers, key=lambda answer: -answer.score)[:keep]
        outputs = [replace(answer.output, index=index) for index, answer in enumerate(answers)]
        return RequestOutput(self.request.id, self.prompt, list(self.request.tokens), outputs, self._prompt_logprobs,
                             self.finished, self._num_cached)
