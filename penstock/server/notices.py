"""Warnings to a client whose request is answered, though not in every point as it may have thought."""

from __future__ import annotations

import logging
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("penstock.server")

NOTICES = "notices"  # in a request's scope: its warnings so far
MAX_NOTICES = 8  # of a request
MAX_NOTICE_CHARS = 300
WINDOW_S = 60.0
MAX_LINES = 20  # in the log in that time, no text twice


def warn(request: Request, text: str) -> None:
    """Tell the client in a Warning header, if its answer has not begun, and the log. A long text is cut."""
    add_notice(request.scope, text)


def add_notice(scope: Scope, text: str) -> None:
    notices: list[str] = scope.setdefault(NOTICES, [])
    text = _plain(text)
    if text in notices or len(notices) >= MAX_NOTICES:
        return
    notices.append(text)
    _journal.write(f"{scope['path'][:MAX_NOTICE_CHARS]}: {text}")


def _plain(text: str) -> str:
    """In printable ASCII, as headers are."""
    told = " ".join(text[: MAX_NOTICE_CHARS + 1].split()).encode("ascii", "backslashreplace").decode()
    told = "".join(char if char.isprintable() else "?" for char in told)
    return told if len(told) <= MAX_NOTICE_CHARS else told[: MAX_NOTICE_CHARS - 3] + "..."


class _Journal:
    """Writes no text twice within a window of time, and only so many lines."""

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._written: set[str] = set()

    def write(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._begun_s > WINDOW_S:
            self._begun_s, self._written = now_s, set()
        if text not in self._written and len(self._written) < MAX_LINES:
            self._written.add(text)
            log.warning("%s", text)


_journal = _Journal()


class Notices:
    """Gives a response one Warning header for each notice of its request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and scope.get(NOTICES):
                message["headers"] = [*message.get("headers", ()), *map(_header, scope[NOTICES])]
            await send(message)

        await self._app(scope, receive, sent)


def _header(text: str) -> tuple[bytes, bytes]:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return b"warning", f'299 penstock "{quoted}"'.encode("ascii")
