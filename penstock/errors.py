"""The errors a user sees: each names the value, the limit and the remedy."""

from __future__ import annotations

from itertools import islice

SHOWN_CHARS = 80
MAX_SHOWN_BITS = 10_000  # Python refuses to format integers of more than 4300 digits


def quote(value: object) -> str:
    """Format a value for a message: on one line, shortened if long."""
    text = " ".join(repr(_shorten(value)).split())
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _shorten(value: object, depth: int = 3) -> object:
    """Return the part of a value that can be shown: a client's may be megabytes, or thousands of levels deep."""
    if isinstance(value, (str, bytes, bytearray)):
        return value[:SHOWN_CHARS]
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return hex(value)[:SHOWN_CHARS]
    if isinstance(value, (list, tuple, dict)) and depth == 0:
        return ...
    if isinstance(value, dict):
        first = islice(value.items(), SHOWN_CHARS)
        return {_shorten(key, depth - 1): _shorten(one, depth - 1) for key, one in first}
    if isinstance(value, (list, tuple)):
        some = [_shorten(one, depth - 1) for one in islice(value, SHOWN_CHARS)]
        return tuple(some) if isinstance(value, tuple) else some
    return value


class PenstockError(Exception):
    """An error that the user can cause and fix. The command line prints it as one line `error: …`."""


class InvalidRequest(PenstockError, ValueError):
    """A prompt or sampling parameter that cannot be served."""


class PromptTooLong(InvalidRequest):
    """More tokens than the context length: `num_tokens`, or at least as many, where `limit` fit."""

    def __init__(self, message: str, num_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.num_tokens, self.limit = num_tokens, limit


class InvalidConfig(PenstockError, ValueError):
    """An engine option that is out of range or contradicts another."""


class InvalidModel(PenstockError, ValueError):
    """A checkpoint that is missing, damaged, unsupported or unsafe."""


class DownloadFailed(PenstockError, OSError):
    """A failed download: no network, no such package, disk full, checksum mismatch."""


class EngineFailed(PenstockError, RuntimeError):
    """The engine could not finish a request; the user is not at fault."""


class Busy(PenstockError):
    """No capacity for a request now; `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: int, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_s, self.status = retry_after_s, status


class DeadlinePassed(PenstockError, TimeoutError):
    """A request exceeded its deadline."""


class RankLost(PenstockError, RuntimeError):
    """A rank of a model spread over processes is gone, or does not answer: the step cannot be finished."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank  # which; -1: not known
