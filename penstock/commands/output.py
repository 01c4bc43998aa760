"""Write answers as they stream, their figures, notes and tables."""

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
    from penstock.api.llm import LLM
    from penstock.types import SamplingParams


class Table:
    """Rows under optional titles."""

    def __init__(self, *titles: str) -> None:
        """Without titles there is no header line."""
        self._rows: list[tuple[str, ...]] = [titles] if titles else []

    def add(self, *cells: str) -> None:
        self._rows.append(cells)

    def plain(self) -> str:
        """Format columns separated by two spaces."""
        widths = self._widths()
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in self._rows]
        return "\n".join(lines) + "\n"

    def markdown(self, right: tuple[str, ...] = ()) -> str:
        """Format as Markdown; the columns titled in `right` are right-aligned."""
        titles, widths = self._rows[0], self._widths()
        lines = []
        for row in self._rows:
            cells = [
                cell.rjust(width) if title in right else cell.ljust(width)
                for title, cell, width in zip(titles, row, widths)
            ]
            lines.append("| " + " | ".join(cells) + " |")
        ruler = ["-" * (width + 1) + (":" if title in right else "-") for title, width in zip(titles, widths)]
        lines.insert(1, "|" + "|".join(ruler) + "|")
        return "\n".join(lines) + "\n"

    def _widths(self) -> list[int]:
        return [max(len(row[column]) for row in self._rows) for column in range(len(self._rows[0]))]


@dataclass
class Figures:
    """Timings of one answer, counted from when the prompt was submitted."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed after the first token; for a single token, its own."""
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
class PrintedAnswer:
    text: str
    finish_reason: str | None
    figures: Figures
    interrupted: bool = False


def stream_answer(
    llm: LLM, prompt: Any, params: SamplingParams, write: Callable[[str], object], limit: int | None = None
) -> PrintedAnswer:
    """Generate, passing each piece of text to `write`. Ctrl-C ends the answer after the current token.

    `limit` ends the answer too; unlike max_tokens it need not fit the context.
    """
    texts: list[str] = []
    figures, finish_reason = Figures(), None
    start = time.perf_counter()
    stream: Any = llm.stream(prompt, params)
    with collect_interrupts() as interrupts, closing(stream):
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
    return PrintedAnswer("".join(texts), finish_reason, figures, bool(interrupts))


@contextmanager
def collect_interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it inside a step; the second one raises."""
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
    """Write to standard error; skip a note that cannot be written."""
    sys.stdout.flush()
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
