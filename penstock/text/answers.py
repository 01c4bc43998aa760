"""Turn tokens into text and outputs: one collector per request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from penstock.text.ledger import DraftCounts, list_applied
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import (
    Applied,
    CompletionOutput,
    Delta,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    StreamDelta,
    TokenLogprobs,
)


class _Trie:
    """Aho-Corasick automaton of the stop strings: one move per character."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]  # length of the longest stop-string prefix that the text ends with
        self.matched: list[str | None] = [None]  # the longest stop string that the text ends with
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        node = 0
        for char in string:
            if char not in self.children[node]:
                self.children[node][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self.matched.append(None)
            node = self.children[node][char]
        self.matched[node] = string

    def _link(self) -> None:
        self.fallback = [0] * len(self.children)
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.children[node].items():
                self.fallback[child] = self.move(self.fallback[node], char)
                queue.append(child)
            if self.matched[node] is None:
                self.matched[node] = self.matched[self.fallback[node]]

    def move(self, node: int, char: str) -> int:
        while node and char not in self.children[node]:
            node = self.fallback[node]
        return self.children[node].get(char, 0)


class StopStrings:
    """Passes text through, minus what may begin a stop string; `matched` is the stop string found.

    The first stop string completed, character by character, ends the text; on ties the longest. So the result does not
    depend on how the text was cut into deltas, and nothing waits for a longer stop string once a shorter one matched.
    """

    def __init__(self, stop: Sequence[str] = (), include: bool = False) -> None:
        self.include = include
        self.matched: str | None = None
        self.is_active = bool(stop)
        self._trie = _Trie(stop) if stop else None
        self._node, self._held = 0, ""

    def push(self, delta: str, watch: bool = True) -> str:
        """Return the text that may be shown after `delta`. `watch=False` (below min_tokens) ignores strings
        completed in it."""
        if self._trie is None or self.matched is not None:
            return "" if self.matched is not None else delta
        text, start = self._held + delta, len(self._held)
        for end, char in enumerate(delta, start + 1):
            self._node = self._trie.move(self._node, char)
            found = self._trie.matched[self._node]
            if found is not None and watch:
                self.matched, self._held = found, ""
                return text[:end] if self.include else text[: end - len(found)]
        safe = len(text) - self._trie.depth[self._node]
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Return the held text at the end."""
        held, self._held, self._node = self._held, "", 0
        return held


class Detokenizer:
    """Yields deltas that never end in half a character; together with `finish()` they are the decode of all ids.

    The text is what the ids add to the prompt: a SentencePiece word keeps its leading space after a prompt, and bytes
    that the prompt left incomplete are completed here. The cost per id does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream = tokenizer.spelling.stream()
        self._stream.push(tokenizer.spelling.tail(prompt_ids, self._hidden))

    def push(self, ids: Iterable[int]) -> str:
        return self._stream.push([id for id in ids if id not in self._hidden])

    def push_one(self, id: int) -> str:
        return "" if id in self._hidden else self._stream.push_one(id)

    def finish(self) -> str:
        """Return what remains at the end: U+FFFD for an incomplete character."""
        return self._stream.finish()


Part = tuple[str, int, tuple[TokenLogprobs, ...]]  # of a delta: text, number of tokens, logprobs
CONTEXT_TOKENS = 16  # of the prompt: enough to continue a character or word that the prompt cut off


class TokenTexts:
    """Adds the text of each token to logprobs; each text is made once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def add_to(self, position: Mapping[int, Logprob]) -> TokenLogprobs:
        """Return one position's logprobs with the text of each token."""
        if self._tokenizer is None:
            return dict(position)
        texts = self._texts
        for id in position:
            if id not in texts:
                texts[id] = self._tokenizer.token_text(id)
        return {id: Logprob(one.logprob, one.rank, texts[id]) for id, one in position.items()}


class AnswerBuilder:
    """One sibling: its tokens so far, and the text that may be shown."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        sampling = request.sampling
        self.score = 0.0
        self.so_far = CompletionOutput(
            index,
            logprobs=None if sampling.logprobs is None and not sampling.logprob_token_ids else [],
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
    def stopped(self) -> bool:
        """True if a stop string ended the answer; the engine does not know of it."""
        return self._stop.matched is not None

    def extend(self, delta: Delta) -> bool:
        """Add a delta of tokens alone; return False, changing nothing, if it carries more."""
        if (
            self._detokenizer is not None
            or delta.finish_reason is not None
            or delta.logprobs
            or delta.prompt_logprobs is not None
            or delta.forced_closing
        ):
            return False
        self.so_far.token_ids.extend(delta.tokens)
        return True

    def add_token(self, token: int) -> str | None:
        """Add one token that does not end the answer; return its text. None, changing nothing, if it may match a stop
        string."""
        if self._stop.is_active:
            return None
        self.so_far.token_ids.append(token)
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push_one(token)
        if text:
            self._texts.append(text)
        return text

    def push(self, delta: Delta) -> Part:
        """Add a step's delta; return the part that belongs to the answer."""
        if self.extend(delta):
            return "", len(delta.tokens), ()
        text, taken = self._take_tokens(delta)
        logprobs = self._take_logprobs(delta.logprobs[:taken]) if delta.logprobs else ()
        output = self.so_far
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
        """Return the new text and the number of tokens taken. An end token is not text, as in vLLM."""
        parts: list[str] = []
        ends = delta.finish_reason == "stop" and not delta.complete
        shown = len(delta.tokens) - (ends and not self._stop.include)
        for index, token in enumerate(delta.tokens):
            self.so_far.token_ids.append(token)
            if self._detokenizer is not None and index < shown:
                watch = len(self.so_far.token_ids) > self._min_tokens
                parts.append(self._stop.push(self._detokenizer.push((token,)), watch))
                if self.stopped:
                    return "".join(parts), index + 1
        return "".join(parts), len(delta.tokens)

    def _take_logprobs(self, positions: Iterable[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
        """Return logprobs with token texts if the request wants them; always sum, since the sum may rank siblings."""
        positions = tuple(positions)
        for position in positions:
            self.score += next(iter(position.values())).logprob
        if self.so_far.logprobs is None:
            return ()
        named = tuple(self.token_texts.add_to(position) for position in positions)
        self.so_far.logprobs.extend(named)
        self.so_far.cumulative_logprob = self.score
        return named

    def output(self, index: int) -> CompletionOutput:
        return replace(self.so_far, index=index, text="".join(self._texts))


def split_delta(delta: Delta) -> Iterator[Delta]:
    """Yield a delta for each token, as if each had come in a step of its own."""
    last = len(delta.tokens) - 1
    for place, token in enumerate(delta.tokens[:last]):
        yield Delta(
            delta.request_id,
            delta.sibling,
            (token,),
            delta.logprobs[place : place + 1],
            delta.prompt_logprobs if place == 0 else None,
            num_cached_tokens=delta.num_cached_tokens,
        )
    yield msgspec.structs.replace(
        delta, tokens=delta.tokens[last:], logprobs=delta.logprobs[last:], prompt_logprobs=None
    )


class Collector:
    """A request and its answers. `listener` is called with each delta."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request, self.prompt = request, prompt
        self.listener: Callable[[StreamDelta], None] | None = None
        self.error: str | None = None
        self.adds_prompt_texts = True  # False: the caller adds texts to prompt logprobs
        self.held: object = None  # kept alive while the request runs
        self.embedding: tuple[float, ...] | None = None
        self.metrics: RequestMetrics | None = None  # maintained by the engine's caller
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached = 0
        self.engine_applied: Sequence[Applied] = ()  # the engine's entries of the ledger
        self.drafts = DraftCounts()
        self._answers: dict[int, AnswerBuilder] = {}
        self._open = request.num_siblings

    @property
    def finished(self) -> bool:
        return self._open <= 0

    @property
    def failed(self) -> bool:
        """True if no answer came of it."""
        return self.error is not None and all(one.so_far.finish_reason == "error" for one in self._answers.values())

    def add_token(self, sibling: int, token: int) -> StreamDelta | None:
        """Add one token to an answer that has begun; return what a listener would hear, without calling it. None,
        changing nothing, if it takes a `push`."""
        answer = self._answers.get(sibling)
        text = None if answer is None else answer.add_token(token)
        if text is None:
            return None
        request = self.request
        return StreamDelta(request.id, sibling, text, (token,), (), None, None, len(request.tokens), self._num_cached)

    def push(self, delta: Delta) -> bool:
        """Add a delta; return True if the engine must stop this sibling. A listener hears of one token at a time, so
        that it can tell which tokens spell what."""
        if delta.drafts:
            self.drafts.add(delta.drafts)
        if self.listener is not None and len(delta.tokens) > 1:
            return any(self._push(one) for one in split_delta(delta))
        return self._push(delta)

    def _push(self, delta: Delta) -> bool:
        answer = self._answers.get(delta.sibling)
        if answer is None:
            answer = self._answers[delta.sibling] = AnswerBuilder(self.request, delta.sibling, self._tokenizer)
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
        self._open -= answer.so_far.finish_reason is not None
        if self.listener is not None:
            self.listener(
                StreamDelta(
                    delta.request_id,
                    delta.sibling,
                    text,
                    delta.tokens[:taken],
                    logprobs,
                    answer.so_far.finish_reason,
                    answer.so_far.stop_reason,
                    len(self.request.tokens),
                    self._num_cached,
                    prompt_logprobs,
                    answer.so_far.forced_closing,
                    answer.so_far.relaxed if answer.so_far.finish_reason else (),
                    () if self._open else self.list_applied(),
                )
            )
        return answer.stopped and not delta.finish_reason

    def output(self) -> RequestOutput:
        answers = [self._answers[sibling] for sibling in sorted(self._answers)]
        keep = self.request.sampling.n
        if not self.request.beam and len(answers) > keep:
            answers = sorted(answers, key=lambda answer: (answer.so_far.finish_reason == "error", -answer.score))[:keep]
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
            self.list_applied(),
        )

    def list_applied(self) -> tuple[Applied, ...]:
        """List the ledger's entries so far."""
        forced = [sibling for sibling, answer in sorted(self._answers.items()) if answer.so_far.forced_closing]
        return list_applied(self.engine_applied, self.request, self.drafts.list_all(), forced)
