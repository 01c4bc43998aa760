"""The one error type a user sees: it names the value, the limit and the remedy."""

from __future__ import annotations

from itertools import islice

SHOWN_CHARS = 80
MAX_SHOWN_BITS = 10_000  # Python writes no integers of more than 4300 digits


def shown(value: object) -> str:
    """A value as it stands in a message: on one line, and not all of it where it is long."""
    text = " ".join(repr(_beginning(value)).split())
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _beginning(value: object, depth: int = 3) -> object:
    """As much of a value as can be shown: a client's may have megabytes, or thousands of levels."""
    if isinstance(value, (str, bytes, bytearray)):
        return value[:SHOWN_CHARS]
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return hex(value)[:SHOWN_CHARS]
    if isinstance(value, (list, tuple, dict)) and depth == 0:
        return ...
    if isinstance(value, dict):
        first = islice(value.items(), SHOWN_CHARS)
        return {_beginning(key, depth - 1): _beginning(one, depth - 1) for key, one in first}
    if isinstance(value, (list, tuple)):
        some = [_beginning(one, depth - 1) for one in islice(value, SHOWN_CHARS)]
        return tuple(some) if isinstance(value, tuple) else some
    return value


class PenstockError(Exception):
    """Anything the user can cause and mend. The command line prints it as one line `error: …`."""


class InvalidRequest(PenstockError, ValueError):
    """A prompt or sampling value that cannot be served."""


class PromptTooLong(InvalidRequest):
    """More tokens than the longest sequence has room for."""


class InvalidConfig(PenstockError, ValueError):
    """An engine option that is out of range or contradicts another."""


class InvalidModel(PenstockError, ValueError):
    """A checkpoint that is missing, damaged, unknown or unsafe."""


class DownloadFailed(PenstockError, OSError):
    """A model could not be fetched: no network, no such package, disk full, checksum mismatch."""


class EngineFailed(PenstockError, RuntimeError):
    """The engine could not finish a request; the fault is not the user's."""


class Busy(PenstockError):
    """There is no room for a request now; `retry_after_s` says when there may be."""

    def __init__(self, message: str, retry_after_s: int, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status


class DeadlinePassed(PenstockError, TimeoutError):
    """A request took longer than it was given."""
