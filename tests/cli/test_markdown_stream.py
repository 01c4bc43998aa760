"""An answer on a screen: every piece of text arrives, nothing steers the terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from penstock.commands.chat import markdown_stream
from penstock.commands.chat.markdown_stream import MarkdownStream, visible

ANSWER = """# Title

Some *words* and `code`, vector<int> and <b>tags</b>, [a link](http://example.org).

1. one
2. two
   - inner

   more of two

```python
def f(x):
    return x
```

| a | b |
|---|---|
| 1 | 2 |

The end."""


def stream(text: str, size: int, height: int = 40, frame_s: float = 0.0, width: int = 60) -> str:
    """Return all that is written for a text that arrives in pieces of `size`."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=height, no_color=True, legacy_windows=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markdown_stream, "FRAME_S", frame_s)
        patch.setattr(markdown_stream, "DRAWING_SHARE", 1e9)
        with MarkdownStream(console) as out:
            for start in range(0, len(text), size):
                out.write(text[start : start + size])
    return file.getvalue()


def screen(written: str) -> list[str]:
    """Return the lines that are left: play back line feeds, returns, ups and erasures."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]|\x1b", written):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif up := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(up[1] or 1))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_the_same_is_left_however_it_arrives(size: int) -> None:
    left = screen(stream(ANSWER, size))
    assert left == screen(stream(ANSWER, len(ANSWER), frame_s=100.0))
    text = "\n".join(left)
    for words in ("Title", "vector<int> and <b>tags</b>", "http://example.org", " 2 two", "• inner", "  def f(x):"):
        assert words in text, words
    assert "*" not in text and "```" not in text and left.count("") < len(left) / 2


def test_more_than_a_screen_is_not_lost() -> None:
    code = "```\n" + "\n".join(f"line {number}" for number in range(60)) + "\n```\n"
    left = screen(stream(code, 5, height=10))
    assert [line.strip() for line in left if line] == [f"line {number}" for number in range(60)]


def test_words_wrap() -> None:
    left = screen(stream("some longer words " * 20, 9, width=30))
    assert all(len(line) <= 30 for line in left) and " ".join(left).split() == ("some longer words " * 20).split()


def test_nothing_steers_the_terminal() -> None:
    hostile = "a\x1b[2Jb\x07c\x9b31md\re\x00 \x1b]0;title\x07 `\x1b[5m`"
    assert not set(visible(hostile)) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}
    written = stream(hostile, 2)
    assert "\x1b[2J" not in written and "\x1b[5m" not in written and "\x1b]" not in written and "\x9b" not in written


def test_a_terminal_that_cannot_draw(chat_model: str, terminal: Callable[..., Any]) -> None:
    """Commands and answers come as plain lines."""
    chat = terminal("chat", chat_model, "--max-tokens", "3", "--load-format=dummy", "--threads=1", TERM="dumb")
    chat.expect(">>> ")
    chat.type("hello\n")
    chat.expect(">>> ")
    chat.type("/bye\n")
    assert chat.status() == 0 and "\x1b" not in chat.raw


def test_the_next_block_has_the_width_that_the_window_has_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    with MarkdownStream() as out:
        out.write("word " * 40 + "\n\n")
        out.write("next\n\n")  # the first block is whole
        out._next_s = 0.0
        monkeypatch.setenv("COLUMNS", "30")
        out.write("more\n\n")
        out._next_s = 0.0
        out.write("word " * 40)
    widths = [len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in capsys.readouterr().out.split("\n")]
    assert 60 < max(widths) <= 70 and 20 < max(widths[-10:]) <= 30
