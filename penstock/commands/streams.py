"""Make the standard streams usable: open, and able to take any text."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import Any, TextIO


def mend_streams() -> None:
    """Reopen closed streams, so that no file takes their number, and escape text their encoding lacks.

    ASCII is upgraded to UTF-8 unless it was asked for.
    """
    _reopen_closed()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = ("stdin", "stdout", "stderr").index(name)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    _configure(sys.stdin, sys.__stdin__, "strict", wanted=None)
    for stream, own in ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)):
        _configure(stream, own, "backslashreplace", os.environ.get("PYTHONIOENCODING", "").partition(":")[0] or None)


def _reopen_closed() -> None:
    """Point the descriptors of closed standard streams at the null device."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one


def _configure(stream: Any, own: TextIO | None, errors: str, wanted: str | None) -> None:
    """Configure a stream unless someone replaced it."""
    if stream is own and isinstance(stream, io.TextIOWrapper):
        is_ascii = codecs.lookup(stream.encoding).name == "ascii"
        stream.reconfigure(encoding="utf-8" if is_ascii and wanted is None else stream.encoding, errors=errors)


def writes_all_text() -> bool:
    """True if standard output needs no escapes."""
    try:
        return codecs.lookup(sys.stdout.encoding or "utf-8").name.startswith("utf")
    except (LookupError, AttributeError):
        return True


def close_broken() -> None:
    """Flush both outputs; discard one that cannot be written, or Python would complain at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
