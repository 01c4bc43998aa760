"""Write an answer to a terminal as it streams: rendered Markdown, wrapped, without flicker."""

from __future__ import annotations

import sys
import time
from typing import Any

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.text import Text

FRAME_S = 1 / 12  # least time between two pictures of the unfinished block
DRAWING_SHARE = 0.1  # of the time that drawing may take
MARGIN_LINES = 4  # of the screen that the unfinished block leaves free
MAX_WIDTH = 120  # lines any longer are hard to read

_CONTROLS: dict[int, int | None] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROLS[ord("\r")] = None
_CONTROLS[0x7F] = 0x2421
_CONTROLS |= {code: 0xFFFD for code in range(0x80, 0xA0)}


def visible(text: str) -> str:
    """Replace control characters by their pictures: an answer must not steer the terminal."""
    return text.translate(_CONTROLS)


class MarkdownStream:
    """Prints finished blocks for good, and redraws the block that is being written."""

    def __init__(self, console: Console | None = None) -> None:
        self._follows = console is None  # the width of the terminal
        self._console = console or Console(width=_width(), highlight=False)
        self._live: Live | None = None
        self._tail = ""  # the text of the unfinished block
        self._num_printed = 0  # lines of that block that are printed for good
        self._next_s = 0.0  # when the next picture may be drawn

    def __enter__(self) -> MarkdownStream:
        return self

    def __exit__(self, *exception: object) -> None:
        """Print what is left, and give the cursor back."""
        for block in _blocks(self._tail):
            self._commit(block)
        self._tail = ""

    def write(self, text: str) -> None:
        self._tail += visible(text)
        start = time.monotonic()
        if start < self._next_s:
            return
        *finished, self._tail = _blocks(self._tail)
        for block in finished:  # later text cannot change it
            self._commit(block)
        self._draw()
        end = time.monotonic()
        self._next_s = end + max(FRAME_S, (end - start) / DRAWING_SHARE)

    def _draw(self) -> None:
        lines = self._render(self._tail)[self._num_printed :]
        num_over = len(lines) - max(1, self._console.size.height - MARGIN_LINES)
        if num_over > 0:  # only what is on the screen can be redrawn
            self._print(lines[:num_over])
            self._num_printed += num_over
            lines = lines[num_over:]
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(Text("\n").join(lines), refresh=True)

    def _commit(self, text: str) -> None:
        """Print a whole block in place of its last picture."""
        live, self._live = self._live, None
        with self._console:  # everything is written at once
            if live is not None:
                live.stop()
            if text.strip():
                self._print([*self._render(text)[self._num_printed :], Text("")])
        self._num_printed = 0
        if self._follows:  # the window may have another size by now
            self._console.width = _width()

    def _print(self, lines: list[Text]) -> None:
        for line in lines:
            self._console.print(line, no_wrap=True, overflow="ignore", crop=False)

    def _render(self, text: str) -> list[Text]:
        """Return lines as wide as the console."""
        drawn = self._console.render_lines(_AnswerMarkdown(text.rstrip()), pad=False)
        lines = [Text.assemble(*((part.text, part.style or "") for part in line)) for line in drawn]
        for line in lines:
            line.rstrip()
        texts = [bool(line.plain) for line in lines]
        return lines[texts.index(True) : len(lines) - texts[::-1].index(True)] if any(texts) else []


def _width() -> int:
    import shutil

    return min(MAX_WIDTH, shutil.get_terminal_size().columns)


def _parser() -> MarkdownIt:
    """Take HTML for text: `vector<int>` would lose its end."""
    return MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")


def _blocks(text: str) -> list[str]:
    """Split at the beginnings of headings, paragraphs, lists, tables and so on."""
    lines = text.split("\n")
    tokens = _parser().parse(text)
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0][1:]
    ends = [*starts, len(lines)]
    return ["\n".join([*lines[start:end], *[""] * (end < len(lines))]) for start, end in zip([0, *starts], ends)]


class _LeftHeading(Heading):
    """A heading at the left, where the text is."""

    def __rich_console__(self, console: Any, options: Any) -> Any:
        self.text.justify = "left"
        yield self.text


class _PlainCodeBlock(CodeBlock):
    """Code in the terminal's own colours, indented, so that it can be copied."""

    def __rich_console__(self, console: Any, options: Any) -> Any:
        code = str(self.text).rstrip()
        yield Syntax(
            code, self.lexer_name, theme="ansi_dark", word_wrap=True, padding=(0, 2), background_color="default"
        )


class _AnswerMarkdown(Markdown):
    elements = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _PlainCodeBlock,
        "code_block": _PlainCodeBlock,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _parser().parse(text)


def can_render() -> bool:
    """True if standard output is a terminal that can move its cursor."""
    console = Console()
    return sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
