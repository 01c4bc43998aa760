"""Read a server's live stream, in a thread that connects again when it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.commands.ps import open_route
from penstock.errors import InvalidRequest, PenstockError
from penstock.server.pidfile import list_servers

PATH = "/admin/live"
SILENCE_S = 15.0  # without an event the connection counts as lost
RETRY_S = 1.0
MAX_LINE_BYTES = 16 << 20  # of an event
PREFIX = b"data: "
Look = dict[str, Any]


class LookRefused(PenstockError):
    """The server does not let us look, and will not if asked again."""


class LookLost(PenstockError):
    """The server cannot be reached now."""


def choose_url(url: str | None) -> str:
    """Return the server's URL: the one given, or that of the only server on this machine."""
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(f"--url={url!r} is not a URL: give one like http://127.0.0.1:8000")
        return url.rstrip("/")
    servers = list_servers()
    if not servers:
        raise InvalidRequest("no server runs on this machine: start one with penstock serve, or give --url")
    if len(servers) > 1:
        known = ", ".join(f"{server.record.url} ({', '.join(server.record.models)})" for server in servers)
        raise InvalidRequest(f"{len(servers)} servers run: say which with --url: {known}")
    return servers[0].record.url


def read_looks(url: str, api_key: str | None) -> Iterator[Look]:
    """Yield looks until the stream ends; `LookRefused` or `LookLost` says why there are none."""
    try:
        with open_route(url, PATH, api_key, SILENCE_S) as answer:
            while line := answer.readline(MAX_LINE_BYTES):
                if line.startswith(PREFIX) and line.endswith(b"\n"):  # else the server died within it
                    yield _parse(line, url)
    except http.client.HTTPException as error:
        raise LookLost(f"{url} broke off ({type(error).__name__})") from None
    except OSError as error:
        raise _explain(url, error) from None
    except ValueError as error:  # of a URL or a header
        raise LookRefused(f"{url} cannot be asked: {error}") from None


def _parse(line: bytes, url: str) -> Look:
    try:
        look = json.loads(line.removeprefix(PREFIX))
        if isinstance(look["models"], list) and isinstance(look["time"], (int, float)):
            return dict(look)
    except (ValueError, KeyError, TypeError):
        pass
    raise LookRefused(f"{url} does not answer as a Penstock server does: is the URL right?")


def _explain(url: str, error: OSError) -> PenstockError:
    status = getattr(error, "code", None)
    if status in (401, 403):
        return LookRefused(
            f"{url} shows this to its admin only: give its admin key with --api-key; a server that has none "
            "gets one by --admin-key-file"
        )
    if status == 404:
        return LookRefused(f"{url} has no {PATH}: it is not a Penstock server, or an older one")
    if status == 429:
        return LookLost(f"too many clients watch {url} already: close one")
    if status is not None:
        return LookLost(f"{url} answered {status}")
    reason = getattr(error, "reason", error)
    if isinstance(reason, ConnectionRefusedError):
        return LookLost(f"nothing answers at {url}: the server is not running")
    return LookLost(f"{url} cannot be reached: {str(reason) or type(reason).__name__}")


class LookThread(threading.Thread):
    """Puts looks, and errors, into `news`; connects again until it is closed."""

    def __init__(self, url: str | None, api_key: str | None, wake: Callable[[], None]) -> None:
        """Without a URL, the server may come back at another one. `wake` is called for each piece of news."""
        super().__init__(name="penstock-top", daemon=True)
        self.url = choose_url(url)
        self.news: queue.SimpleQueue[Look | PenstockError] = queue.SimpleQueue()
        self._is_given, self._api_key, self._wake = url is not None, api_key, wake
        self._closing = threading.Event()

    def run(self) -> None:
        while not self._closing.is_set():
            try:
                for look in read_looks(self.url, self._api_key):
                    self._tell(look)
                    if self._closing.is_set():
                        return
                self._tell(LookLost(f"{self.url} has ended the stream: the server stops or restarts"))
            except LookRefused as error:
                return self._tell(error)
            except PenstockError as error:
                self._tell(error)
            except Exception as error:
                self._tell(LookLost(f"{self.url} sent something unreadable ({type(error).__name__})"))
            self._closing.wait(RETRY_S)
            if not self._is_given:
                with contextlib.suppress(PenstockError):
                    self.url = choose_url(None)

    def close(self) -> None:
        self._closing.set()

    def _tell(self, news: Look | PenstockError) -> None:
        self.news.put(news)
        if not self._closing.is_set():
            self._wake()


def take_snapshot(url: str, api_key: str | None, settle_s: float) -> Look:
    """Return a look that was preceded by others for some seconds, so that it has rates."""
    end_s = time.monotonic() + settle_s
    for look in read_looks(url, api_key):
        if time.monotonic() >= end_s:
            return look
    raise LookLost(f"{url} has ended the stream: the server stops or restarts")
