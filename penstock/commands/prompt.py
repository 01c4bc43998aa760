"""Read a prompt from the command line, standard input, or both."""

from __future__ import annotations

import os
import select
import stat
import sys

from penstock.commands.output import write_note
from penstock.errors import InvalidRequest, quote

STDIN = "-"
PATIENCE_S = 1.0
MAX_PROMPT_CHARS = 1 << 25  # more than any model takes; standard input may never end


def read_prompt(words: list[str]) -> str | None:
    """Return the prompt; None if there is none and standard input is a terminal.

    Words and standard input are joined, words first: `penstock run smollm2 "Summarize:" < notes.txt`.
    """
    given = " ".join(read_word(word, "the prompt") for word in words if word != STDIN)
    if STDIN in words or (not words and not sys.stdin.isatty()):
        piped = _read_stdin()
    elif words:
        piped = _read_piped()
    else:
        return None
    prompt = f"{given}\n\n{piped}" if given.strip() and piped.strip() else given or piped
    if not prompt.strip():
        raise InvalidRequest("the prompt is empty: give some text after the model's name or on standard input")
    return prompt


def read_word(word: str, name: str) -> str:
    """Decode a command-line word; as UTF-8 if the locale names no encoding."""
    if word.isascii():
        return word
    try:
        return os.fsencode(word).decode() if any("\udc80" <= letter <= "\udcff" for letter in word) else word
    except UnicodeError:
        raise InvalidRequest(f"{name} is not UTF-8 text: {quote(word)}; convert it, for example with iconv") from None


def _read_stdin() -> str:
    try:
        text = sys.stdin.read(MAX_PROMPT_CHARS + 1)
    except UnicodeError as error:
        raise InvalidRequest(not_text(error)) from None
    except OSError as error:
        raise InvalidRequest(
            f"standard input cannot be read ({error.strerror}): give the prompt after the model's name"
        ) from None
    if len(text) > MAX_PROMPT_CHARS:
        raise InvalidRequest(f"standard input has more than {MAX_PROMPT_CHARS} characters: give a shorter prompt")
    return text.removesuffix("\n")


def not_text(error: UnicodeError) -> str:
    """Explain standard input that cannot be decoded."""
    encoding = (sys.stdin.encoding or "UTF-8").upper()
    reason = str(error)
    if isinstance(error, UnicodeDecodeError):
        reason = f"byte {error.start} is {error.object[error.start]:#x}"
    return f"standard input is not {encoding} text: {reason}; convert it, for example with iconv"


def _read_piped() -> str:
    """Read what is piped in beside a prompt; give up on a silent open pipe after a moment."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return ""
    if stat.S_ISREG(mode):
        return _read_stdin()
    if not stat.S_ISFIFO(mode):
        return ""
    if select.select([sys.stdin], [], [], PATIENCE_S)[0]:
        return _read_stdin()
    write_note(f"note: standard input was silent for {PATIENCE_S:g} s and is not read; add - to the prompt to wait")
    return ""
