"""Split reasoning from the answer that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.text.answer_events import Event, MarkerSearch, ReasoningDelta, TextDelta, skip
from penstock.text.chat import harmony
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import ReasoningBlock

Part = TextDelta | ReasoningDelta


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    begin: str
    end: str


HARMONY = "openai_gptoss"
REASONING = {  # named as in vLLM
    "deepseek_r1": ReasoningMarks("<think>", "</think>"),
    "qwen3": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
    HARMONY: ReasoningMarks(harmony.ANALYSIS, harmony.FINAL),
}
MARKER_TOKENS = 32  # at a prompt's end: a marker and the whitespace after it are shorter
SWITCHES = ("enable_thinking", "thinking")  # template variables


class Splitter(Protocol):
    """Streamed text in, reasoning and text out, and calls where the form has them in the same headers."""

    @property
    def is_inside(self) -> bool: ...

    def push(self, text: str) -> Sequence[Event]: ...

    def finish(self) -> Sequence[Event]: ...


class ReasoningSplitter:
    """Splits streamed text into reasoning and text; the sums do not depend on how the stream is cut.

    Reasoning is one block and comes first: after other text, markers are text. `inside`: the prompt opened the block
    (the model may repeat the marker). Line breaks after a marker are dropped unless `exact`. A block that never closes
    is all reasoning.
    """

    def __init__(
        self, begin: str = "<think>", end: str = "</think>", inside: bool = False, exact: bool = False
    ) -> None:
        self._begin, self._end = MarkerSearch(begin), MarkerSearch(end)
        self._inside, self._exact = inside, exact
        self._step: Callable[[str, int], int] = self._start
        self._held: list[str] = []  # whitespace before what may be the opening marker
        self._rest = ""
        self._parts: list[Part] = []

    @property
    def is_inside(self) -> bool:
        """True if the text so far ends in reasoning."""
        return self._inside

    def push(self, text: str) -> list[Part]:
        text, at = self._rest + text, 0
        while at < len(text):
            step = self._step
            end = step(text, at)
            if end == at and self._step == step:
                break
            at = end
        self._rest = text[at:]
        return self._take()

    def finish(self) -> list[Part]:
        """Return what was held, at the end."""
        self._emit(self._rest)
        self._rest = ""
        return self._take()

    def _start(self, text: str, at: int) -> int:
        end = skip(text, at)
        self._held.append(text[at:end])
        marker = self._begin.here(text, end)
        if marker is None:
            return end
        if marker:
            self._held, self._inside = [], True
        elif self._inside:
            self._held = ["".join(self._held).lstrip("\n")]
        self._step = self._open if marker else self._body
        return end + len(marker)

    def _open(self, text: str, at: int) -> int:
        """Drop line breaks after a marker."""
        while at < len(text) and text[at] == "\n":
            at += 1
        if at < len(text):
            self._step = self._body
        return at

    def _body(self, text: str, at: int) -> int:
        if not self._inside:
            self._emit(text[at:])
            return len(text)
        end, marker = self._end.seek(text, at)
        self._emit(text[at:end])
        if marker:
            self._inside, self._step = False, self._body if self._exact else self._open
        return end + len(marker)

    def _emit(self, text: str) -> None:
        text, self._held = "".join([*self._held, text]), []
        if text:
            self._parts.append(ReasoningDelta(text) if self._inside else TextDelta(text))

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


def detect_kind(chat_template: str | None) -> str | None:
    """Return the template's kind of reasoning, a key of REASONING."""
    source = chat_template or ""
    return next((kind for kind, marks in REASONING.items() if marks.begin in source or marks.end in source), None)


def find_block(kind: str | None, prompt_text: str, values: Mapping[str, Any] | None = None) -> ReasoningBlock | None:
    """Return the reasoning block that the answer may begin with. None if the prompt closed it, or if template
    variables switch thinking off and the prompt did not open it."""
    if kind is None:
        return None
    marks, text = REASONING[kind], prompt_text.rstrip()
    if text.endswith(marks.begin):
        return ReasoningBlock(marks.begin, marks.end, is_open=True)
    if text.endswith(marks.end) or any((values or {}).get(name) is False for name in SWITCHES):
        return None
    return ReasoningBlock(marks.begin, marks.end)


def prompt_block(
    kind: str | None, tokenizer: Tokenizer, tokens: Sequence[int], prompt: str | None
) -> ReasoningBlock | None:
    """Like `find_block`, for a prompt of tokens whose text may be unknown."""
    if prompt is None and kind is not None:
        prompt = tokenizer.decode(tokens[-MARKER_TOKENS:], skip_special_tokens=False)
    return find_block(kind, prompt or "")


def new_splitter(kind: str | None, prompt_text: str, exact: bool = False) -> Splitter | None:
    """Return a splitter for the answer to this prompt; None if the model has no reasoning. A prompt that ends with
    the opening marker opened the block."""
    if kind is None:
        return None
    marks = REASONING[kind]
    inside = prompt_text.rstrip().endswith(marks.begin)
    if kind == HARMONY:
        return harmony.HarmonySplitter(inside)
    return ReasoningSplitter(marks.begin, marks.end, inside, exact)
