"""Where a prompt comes from: the command line, standard input, or both."""

from __future__ import annotations

import os
import select
import stat
import sys

from penstock.commands.answer import write_note
from penstock.errors import InvalidRequest

STDIN = "-"
PATIENCE_S = 1.0


def read_prompt(words: list[str]) -> str | None:
    """The prompt; None when there is none and a person sits at the terminal.

    Words and standard input together give the words first: `penstock run smollm2 "Summarize:" < notes.txt`.
    """
    given = " ".join(word for word in words if word != STDIN)
    if STDIN in words or (not words and not sys.stdin.isatty()):
        piped = _read_stdin()
    elif words:
        piped = _offered_stdin()
    else:
        return None
    prompt = f"{given}\n\n{piped}" if given.strip() and piped.strip() else given or piped
    if not prompt.strip():
        raise InvalidRequest("the prompt is empty: give some text after the model's name or on standard input")
    return prompt


def _read_stdin() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}"
                             ) from error


def _offered_stdin() -> str:
    """What is piped in beside a prompt. A pipe that someone merely left open is given up after a moment."""
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
