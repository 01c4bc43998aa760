"""Entries of a batch, calls of the app in process for them, and the lines of their results."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from penstock.errors import InvalidRequest, quote
from penstock.server.http.context import IDENTITY, Client, new_id

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ID = "batch_req_"
PREFIX = b'{"id":"' + ID.encode()


@dataclass(frozen=True)
class BatchEntry:
    custom_id: str
    url: str
    body: bytes


class BadEntry(Exception):
    """A line that is not a valid request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


def parse_entry(line: bytes) -> BatchEntry:
    try:
        asked = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadEntry("invalid_json_line", f"the line is not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise BadEntry("invalid_json_line", f"the line is not an object: {quote(asked)}")
    custom_id = asked.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadEntry("missing_custom_id", f"custom_id={quote(custom_id)}: give every line a unique string")
    method, url, body = asked.get("method"), asked.get("url"), asked.get("body")
    if method != "POST":
        raise BadEntry("invalid_method", f"method={quote(method)}: only POST is supported", custom_id)
    if url not in URLS:
        raise BadEntry("invalid_url", f"url={quote(url)}: give one of {', '.join(URLS)}", custom_id)
    if not isinstance(body, dict):
        raise BadEntry("invalid_body", f"body={quote(body)}: give the request's body as an object", custom_id)
    if body.get("stream"):
        raise BadEntry("invalid_body", "batches do not stream: leave 'stream' out", custom_id)
    if body.get("background"):
        raise BadEntry("invalid_body", "batches wait for responses: leave 'background' out", custom_id)
    return BatchEntry(custom_id, url, msgspec.json.encode(body))


def make_result(entry: BatchEntry, status: int, body: bytes) -> dict[str, Any]:
    """Make the result line of a response, errors included."""
    return {
        "id": new_id(ID),
        "custom_id": entry.custom_id,
        "response": {"status_code": status, "request_id": new_id("req_"), "body": msgspec.Raw(body or b"null")},
        "error": None,
    }


def make_error_result(bad: BadEntry, number: int) -> dict[str, Any]:
    """Make the result line of a bad input line; `number` counts from 1."""
    return {
        "id": new_id(ID),
        "custom_id": bad.custom_id,
        "response": None,
        "error": {"code": bad.code, "message": bad.message, "line": number},
    }


class OutputFile:
    """Results of a batch; opened once, appended line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()  # custom ids
        self.bad_lines: set[int] = set()  # input lines that were refused
        self.num_lines = self.num_failed = 0
        try:
            self._file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None
        try:
            self._read()
        except OSError as error:
            self._file.close()
            raise InvalidRequest(f"cannot read {path}: {error.strerror or error}; give a regular file") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, result: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(result) + b"\n")
        self._file.flush()
        self._count(result)

    def _read(self) -> None:
        """Read existing results; a half-written last line is removed."""
        self._file.seek(0)
        begin = 0
        for number, line in enumerate(self._file, start=1):
            result = _decode(line)
            if result is not None:
                self._count(result)
            elif line.endswith(b"\n") or not (line.startswith(PREFIX) or PREFIX.startswith(line)):
                raise InvalidRequest(
                    f"{self.path} line {number} is not a batch result, so nothing was written: give "
                    "a new file, or one that run-batch wrote"
                )
            else:
                self._file.truncate(begin)
                return
            begin += len(line)
            if not line.endswith(b"\n"):
                self._file.write(b"\n")
                self._file.flush()

    def _count(self, result: dict[str, Any]) -> None:
        if result["custom_id"] is not None:
            self.done.add(result["custom_id"])
        if result["error"]:
            self.bad_lines.add(result["error"].get("line"))
        self.num_lines += 1
        self.num_failed += result["response"] is None or result["response"]["status_code"] >= 400


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        result = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    is_result = isinstance(result, dict) and {"custom_id", "response", "error"} <= result.keys()
    return result if is_result else None


class LocalClient:
    """Posts as `client`; without one the app identifies it as usual."""

    def __init__(self, app: ASGIApp, client: Client | None = None) -> None:
        self._app = app
        self._identity = {} if client is None else {IDENTITY: client}

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Post and return status and body. Cancelling acts as a disconnect."""
        unread = [body]
        status, parts = 500, []

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.Event().wait()  # until cancelled
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(_make_scope(path, len(body)) | self._identity, receive, send)
        return status, b"".join(parts)


def _make_scope(path: str, num_bytes: int) -> dict[str, Any]:
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(num_bytes).encode()),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
