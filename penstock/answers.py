"""Tokens become text and finished outputs: one collector per request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from penstock.text.detokenizer import Detokenizer
from penstock.text.stop import StopStrings
from penstock.text.tokenizer import Tokenizer
from penstock.types import (
    CompletionOutput,
    Delta,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    StreamDelta,
    TokenLogprobs,
)

Part = tuple[str, int, tuple[TokenLogprobs, ...]]  # of a delta: its text, how many of its tokens, their numbers
CONTEXT_TOKENS = 16  # of the prompt: enough to continue a character or a word that the prompt broke off


class TokenTexts:
    """Adds to log probabilities the text of each token by itself, made once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def add_to(self, position: Mapping[int, Logprob]) -> TokenLogprobs:
        """One position's log probabilities with the text of each token."""
        if self._tokenizer is None:
            return dict(position)
        texts = self._texts
        for id in position:
            if id not in texts:
                texts[id] = self._tokenizer.token_text(id)
        return {id: Logprob(one.logprob, one.rank, texts[id]) for id, one in position.items()}


class Answer:
    """One sibling: its tokens so far, and the text that may be shown of them."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        sampling = request.sampling
        self.score = 0.0
        self._output = CompletionOutput(
            index,
            logprobs=None if sampling.logprobs is None else [],
            relaxed=request.grammar.relaxed if request.grammar else (),
        )
        self._texts: list[str] = []
        self._min_tokens = sampling.min_tokens
        self._tokenizer = tokenizer if sampling.detokenize else None
        self.token_texts = TokenTexts(self._tokenizer)
        self._detokenizer = None
        if self._tokenizer is not None:
            context = request.tokens[-CONTEXT_TOKENS:]
            self._detokenizer = Detokenizer(self._tokenizer, sampling.skip_special_tokens, context)
        self._stop = StopStrings(tuple(sampling.stop or ()), sampling.include_stop_str_in_output)

    @property
    def finish_reason(self) -> str | None:
        return self._output.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self._output.stop_reason

    @property
    def forced_closing(self) -> bool:
        return self._output.forced_closing

    @property
    def relaxed(self) -> tuple[str, ...]:
        return self._output.relaxed

    @property
    def stopped(self) -> bool:
        """A stop string ended the answer; the engine does not know of it."""
        return self._stop.matched is not None

    def extend(self, delta: Delta) -> bool:
        """Take in tokens that say nothing more; False, with nothing changed, if there is more to it."""
        if (
            self._detokenizer is not None
            or delta.finish_reason is not None
            or delta.logprobs
            or delta.prompt_logprobs is not None
            or delta.forced_closing
        ):
            return False
        self._output.token_ids.extend(delta.tokens)
        return True

    def push(self, delta: Delta) -> Part:
        """Take in what a step added: the part of it that belongs to the answer."""
        if self.extend(delta):
            return "", len(delta.tokens), ()
        text, taken = self._take_tokens(delta)
        logprobs = self._take_logprobs(delta.logprobs[:taken]) if delta.logprobs else ()
        output = self._output
        output.forced_closing |= delta.forced_closing
        if self.stopped:
            output.finish_reason, output.stop_reason = "stop", self._stop.matched
        elif delta.finish_reason:
            if self._detokenizer is not None:
                text += self._stop.push(self._detokenizer.finish()) + self._stop.finish()
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.cumulative_logprob is not None:
            output.cumulative_logprob = delta.cumulative_logprob
        if text:
            self._texts.append(text)
        return text, taken, logprobs

    def _take_tokens(self, delta: Delta) -> tuple[str, int]:
        """The new text, and how many tokens were taken. A token that ends the answer is no text of it, as in vLLM."""
        parts: list[str] = []
        ends = delta.finish_reason == "stop" and not delta.complete
        shown = len(delta.tokens) - (ends and not self._stop.include)
        for index, token in enumerate(delta.tokens):
            self._output.token_ids.append(token)
            if self._detokenizer is not None and index < shown:
                watch = len(self._output.token_ids) > self._min_tokens
                parts.append(self._stop.push(self._detokenizer.push((token,)), watch))
                if self.stopped:
                    return "".join(parts), index + 1
        return "".join(parts), len(delta.tokens)

    def _take_logprobs(self, positions: Iterable[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
        """With names, where the request wants them; the sum always, since it may decide which siblings are kept."""
        positions = tuple(positions)
        for position in positions:
            self.score += next(iter(position.values())).logprob
        if self._output.logprobs is None:
            return ()
        named = tuple(self.token_texts.add_to(position) for position in positions)
        self._output.logprobs.extend(named)
        self._output.cumulative_logprob = self.score
        return named

    def output(self, index: int) -> CompletionOutput:
        return replace(self._output, index=index, text="".join(self._texts))


class Collector:
    """A request and its answers. `listener` is told of each delta as it comes."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.prompt = prompt
        self.listener: Callable[[StreamDelta], None] | None = None
        self.error: str | None = None
        self.adds_prompt_texts = True  # False: whoever shows a prompt's log probabilities adds them
        self.held: object = None  # what must stay in memory for as long as the request runs
        self.embedding: tuple[float, ...] | None = None
        self.metrics: RequestMetrics | None = None  # kept by who steps the engine
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached = 0
        self._answers: dict[int, Answer] = {}
        self._open = request.num_siblings

    @property
    def finished(self) -> bool:
        return self._open <= 0

    @property
    def failed(self) -> bool:
        """Not one answer came of it."""
        return self.error is not None and all(one.finish_reason == "error" for one in self._answers.values())

    def push(self, delta: Delta) -> bool:
        """Take in a delta; whether the engine must end this sibling."""
        answer = self._answers.get(delta.sibling)
        if answer is None:
            answer = self._answers[delta.sibling] = Answer(self.request, delta.sibling, self._tokenizer)
        elif self.listener is None and answer.extend(delta):
            return False
        if delta.sibling == 0:
            self._num_cached = delta.num_cached_tokens
        self.error = delta.error or self.error
        self.embedding = delta.embedding or self.embedding
        text, taken, logprobs = answer.push(delta)
        prompt_logprobs = None
        if delta.prompt_logprobs is not None:
            prompt_logprobs = delta.prompt_logprobs
            if self.adds_prompt_texts:
                prompt_logprobs = tuple(p and answer.token_texts.add_to(p) for p in prompt_logprobs)
            self._prompt_logprobs = list(prompt_logprobs)
        self._open -= answer.finish_reason is not None
        if self.listener is not None:
            self.listener(
                StreamDelta(
                    delta.request_id,
                    delta.sibling,
                    text,
                    delta.tokens[:taken],
                    logprobs,
                    answer.finish_reason,
                    answer.stop_reason,
                    len(self.request.tokens),
                    self._num_cached,
                    prompt_logprobs,
                    answer.forced_closing,
                    answer.relaxed if answer.finish_reason else (),
                )
            )
        return answer.stopped and not delta.finish_reason

    def output(self) -> RequestOutput:
        answers = [self._answers[sibling] for sibling in sorted(self._answers)]
        keep = self.request.sampling.n
        if not self.request.beam and len(answers) > keep:
            answers = sorted(answers, key=lambda answer: (answer.finish_reason == "error", -answer.score))[:keep]
        outputs = [answer.output(index) for index, answer in enumerate(answers)]
        return RequestOutput(
            self.request.id,
            self.prompt,
            list(self.request.tokens),
            outputs,
            self._prompt_logprobs,
            self.finished,
            self._num_cached,
            self.error,
            self.metrics,
        )
