"""One answer on its way to the screen, and the figures about it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.llm import LLM
    from penstock.types import SamplingParams


@dataclass
class Figures:
    """How one answer went. Times count from the moment the prompt was handed over."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The pace after the first token, which is the prompt's work; of a single token, its own."""
        if self.num_generated_tokens > 1:
            return (self.num_generated_tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)
        return self.num_generated_tokens / max(self.total_s, 1e-9)

    def line(self) -> str:
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        return (
            f"{self.num_prompt_tokens} prompt tokens{cached}, {self.num_generated_tokens} generated tokens, "
            f"{self.first_token_s:.2f} s to first token, {self.tokens_per_s:.1f} tok/s"
        )


@dataclass
class Answer:
    text: str
    finish_reason: str | None
    figures: Figures
    interrupted: bool = False


def stream_answer(
    llm: LLM, prompt: Any, params: SamplingParams, write: Callable[[str], object], limit: int | None = None
) -> Answer:
    """Generate and hand each piece of text to `write`. Ctrl-C ends the answer after the token under way.

    `limit` ends the answer too; unlike max_tokens it need not fit into the context.
    """
    texts: list[str] = []
    figures, finish_reason = Figures(), None
    start = time.perf_counter()
    stream: Any = llm.stream(prompt, params)
    with noted_interrupts() as interrupts, closing(stream):
        for delta in stream:
            figures.total_s = time.perf_counter() - start
            if delta.token_ids and not figures.num_generated_tokens:
                figures.first_token_s = figures.total_s
            figures.num_generated_tokens += len(delta.token_ids)
            figures.num_prompt_tokens = delta.num_prompt_tokens
            figures.num_cached_tokens = delta.num_cached_tokens
            finish_reason = delta.finish_reason or finish_reason
            texts.append(delta.text)
            write(delta.text)
            if interrupts:
                break
            if limit and figures.num_generated_tokens >= limit and finish_reason is None:
                finish_reason = "length"
                break
    return Answer("".join(texts), finish_reason, figures, bool(interrupts))


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it in the middle of a step; the second one raises."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)
        if len(noted) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, previous)


def write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def write_note(text: str) -> None:
    """To standard error. A note that cannot be written is left out: the answer is not worth less for it."""
    sys.stdout.flush()
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
