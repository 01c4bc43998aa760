"""Perplexity of a text over overlapping windows; each token is scored once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.errors import InvalidRequest, PenstockError
from penstock.host.progress import counting_bar
from penstock.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from penstock.api.llm import LLM
    from penstock.text.tokenizers.tokenizer import Tokenizer

LONGEST_WINDOW = 1024  # default window, at most
MAX_NATS = 700  # per token; a higher perplexity overflows a float
TOKENS_AT_ONCE = 2048  # windows are submitted in groups, so that short ones share a step


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) of the text; those from `first` on are scored."""

    begin: int
    first: int
    end: int


@dataclass(frozen=True)
class Score:
    """Losses of a text's tokens: negative log likelihoods in nats."""

    losses: list[float]
    num_bytes: int  # of the text that the scored tokens spell
    window: int
    stride: int
    seconds: float

    @cached_property
    def nats_per_token(self) -> float:
        return math.fsum(self.losses) / len(self.losses)

    @property
    def bits_per_byte(self) -> float:
        return math.fsum(self.losses) / math.log(2) / self.num_bytes

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @property
    def standard_error(self) -> float:
        """Standard error of the perplexity, to first order: its derivative by the mean loss is itself."""
        return self.perplexity * statistics.stdev(self.losses) / math.sqrt(len(self.losses))


def perplexity(
    llm: LLM,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    progress: bool = False,
) -> Score:
    """Score a text, or its first `max_tokens` tokens.

    A window has `window` tokens, including the tokenizer's prefix, and begins `stride` after the one before. The first
    scores all it can, every other its last `stride` tokens, which so have at least window - stride before them. The
    very first token is scored only if the tokenizer puts something before it.
    """
    check_counts(window, stride, max_tokens)
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InvalidRequest("perplexity needs a tokenizer: do not set skip_tokenizer_init")
    before = tokens_before(tokenizer)
    window, stride = _sizes(llm, window, stride, len(before))
    every = tokenizer.encode(text, add_special_tokens=False)
    tokens = every[:max_tokens]
    if len(tokens) + bool(before) < 3:
        raise InvalidRequest(
            f"the text has {len(tokens)} tokens to score, too few for a perplexity with its standard "
            f"error: give {2 if before else 3} or more"
        )
    start = time.perf_counter()
    losses = _losses(llm, before, tokens, list(windows(len(tokens), window, stride, len(before))), window, progress)
    if not math.fsum(losses) / len(losses) < MAX_NATS:
        raise PenstockError(
            f"the model gives this text {math.fsum(losses) / len(losses):g} nats per token, above "
            f"{MAX_NATS}: its weights or its arithmetic are damaged"
        )
    num_bytes = len(text.encode()) if len(tokens) == len(every) else _num_bytes(tokenizer, tokens)
    if not before:
        num_bytes -= _num_bytes(tokenizer, tokens[:1])
    return Score(losses, max(1, num_bytes), window, stride, time.perf_counter() - start)


def check_counts(window: int | None, stride: int | None, max_tokens: int | None) -> None:
    """Refuse bad values before a model is loaded."""
    for name, value, least in (("window", window, 2), ("stride", stride, 1), ("max_tokens", max_tokens, 1)):
        if value is not None and value < least:
            raise InvalidRequest(f"{name}={value} is out of range: it must be {least} or more")
    if window is not None and stride is not None and stride >= window:
        raise InvalidRequest(
            f"stride={stride} leaves no context in a window of {window}: set a stride of at most "
            f"{window - 1}, or a larger window"
        )


def windows(num_tokens: int, window: int, stride: int, num_before: int = 0) -> Iterator[Window]:
    """Yield the windows of a text. `num_before` tokens of each are the tokenizer's prefix."""
    room = window - num_before
    end = min(room, num_tokens)
    yield Window(0, 0 if num_before else 1, end)
    while end < num_tokens:
        first, end = end, min(end + stride, num_tokens)
        yield Window(first - (room - stride), first, end)


def tokens_before(tokenizer: Tokenizer) -> list[int]:
    """Return the tokenizer's prefix of every text: often a BOS token, often nothing."""
    whole, inner = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    at = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
    return whole[:at]


def _sizes(llm: LLM, window: int | None, stride: int | None, num_before: int) -> tuple[int, int]:
    longest = llm.service.intake.longest
    if window is None:
        window = min(longest, LONGEST_WINDOW) if stride is None else min(longest, max(LONGEST_WINDOW, 2 * stride))
    if window > longest:
        raise InvalidRequest(
            f"window={window} exceeds the context length of {longest}: set at most {longest}, or "
            "raise max_model_len and kv_cache_tokens as far as the model's context allows"
        )
    stride = window // 2 if stride is None else stride
    most = window - max(1, num_before)
    if not 1 <= stride <= most:
        raise InvalidRequest(
            f"stride={stride} leaves no context in a window of {window}: set a stride of at most "
            f"{most}, or a larger window"
        )
    return window, stride


def _losses(
    llm: LLM, before: list[int], tokens: list[int], places: Sequence[Window], window: int, progress: bool
) -> list[float]:
    at_once = max(1, min(TOKENS_AT_ONCE, llm.service.assembly.settings.kv_cache_tokens) // window)
    losses: list[float] = []
    with counting_bar(progress, len(places), "Windows") as advance:
        for first in range(0, len(places), at_once):
            group = places[first : first + at_once]
            losses += _group_losses(llm, before, tokens, group, advance)
    return losses


def _group_losses(
    llm: LLM, before: list[int], tokens: list[int], group: Sequence[Window], advance: Callable[[int], object]
) -> list[float]:
    """Score a group of windows. The last token of each is forced by allowed_token_ids, so that a window may fill the
    context; logprobs are of the raw distribution."""
    prompts = [before + tokens[place.begin : place.end - 1] for place in group]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=1,
            detokenize=False,
            prompt_logprobs=0,
            logprobs=0,
            allowed_token_ids=[tokens[place.end - 1]],
        )
        for place in group
    ]
    losses: list[float] = []
    for place, output in zip(group, llm.generate(prompts, params, use_tqdm=False)):
        losses += _window_losses(output)[-(place.end - place.first) :]
    advance(len(group))
    return losses


def _window_losses(output: RequestOutput) -> list[float]:
    """Return the losses of all tokens of a window but its first."""
    answer = output.outputs[0]
    if output.error or answer.logprobs is None or output.prompt_logprobs is None:
        raise PenstockError(f"the model failed on a window: {output.error}")
    positions = [*output.prompt_logprobs[1:], *answer.logprobs]
    return [-next(iter(position.values())).logprob for position in positions if position]


def _num_bytes(tokenizer: Tokenizer, tokens: list[int]) -> int:
    return len(tokenizer.decode(tokens, skip_special_tokens=False).encode())
