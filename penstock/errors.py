"""The one error type a user sees: it names the value, the limit and the remedy."""

from __future__ import annotations

SHOWN_CHARS = 80


def shown(value: object) -> str:
    """A value as it stands in a message: on one line, and not all of it where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS - 3] + "..."


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
