"""Reasoning told apart from the answer that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.text.events import Reasoning, Text
from penstock.text.markers import Markers, skip
from penstock.text.tokenizer import Tokenizer
from penstock.types import ReasoningBlock

Part = Text | Reasoning


@dataclass(frozen=True, slots=True)
class Marks:
    begin: str
    end: str


REASONING = {  # named as in vLLM
    "deepseek_r1": Marks("<think>", "</think>"),
    "qwen3": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "granite": Marks("Here is my thought process:", "Here is my response:"),
}
MARKER_TOKENS = 32  # at the end of a prompt: no marker and the blanks behind it have more
SWITCHES = ("enable_thinking", "thinking")  # variables of templates


class ReasoningSplitter:
    """Text in pieces in; text and reasoning out, whose sum does not depend on the pieces.

    Reasoning is one block and comes first: once there is text, markers are text like any other. `inside` says that
    the prompt opened the block; a model that opens it again is forgiven. Line breaks right behind a marker are
    dropped, unless `exact` says that the answer begins right behind the end marker. A block that never closes is all
    reasoning.
    """

    def __init__(
        self, begin: str = "<think>", end: str = "</think>", inside: bool = False, exact: bool = False
    ) -> None:
        self._begin, self._end = Markers(begin), Markers(end)
        self._inside, self._exact = inside, exact
        self._step: Callable[[str, int], int] = self._start
        self._held: list[str] = []  # space before what may be the opening marker
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
        """What was held, once no more will come."""
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
        """Behind a marker: line breaks are dropped."""
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
            self._parts.append(Reasoning(text) if self._inside else Text(text))

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


def detect_kind(chat_template: str | None) -> str | None:
    """The kind of reasoning that the template knows, a key of REASONING."""
    source = chat_template or ""
    return next((kind for kind, marks in REASONING.items() if marks.begin in source or marks.end in source), None)


def find_block(kind: str | None, prompt_text: str, values: Mapping[str, Any] | None = None) -> ReasoningBlock | None:
    """The reasoning that the answer to this prompt may begin with. There is none where the prompt has closed the block,
    or where a template's variables switch thinking off and the prompt has not opened it."""
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
    """The same for a prompt of tokens, whose text may not be known."""
    if prompt is None and kind is not None:
        prompt = tokenizer.decode(tokens[-MARKER_TOKENS:], skip_special_tokens=False)
    return find_block(kind, prompt or "")


def new_splitter(kind: str | None, prompt_text: str, exact: bool = False) -> ReasoningSplitter | None:
    """For the answer to this prompt; None where the model has no reasoning. A prompt that ends with the opening marker
    has opened the block."""
    if kind is None:
        return None
    marks = REASONING[kind]
    return ReasoningSplitter(marks.begin, marks.end, inside=prompt_text.rstrip().endswith(marks.begin), exact=exact)
