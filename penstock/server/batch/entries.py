"""One line of a batch: what it asks, and what is written for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import shown
from penstock.server.context import new_id

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ID = "batch_req_"


@dataclass(frozen=True)
class Entry:
    custom_id: str
    url: str
    body: bytes


class BadEntry(Exception):
    """A line that asks nothing that can be answered."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


def parse(line: bytes) -> Entry:
    try:
        asked = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadEntry("invalid_json_line", f"the line is no valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise BadEntry("invalid_json_line", f"the line is no object: {shown(asked)}")
    custom_id = asked.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadEntry("missing_custom_id", f"custom_id={shown(custom_id)}: give every line a text of its own")
    method, url, body = asked.get("method"), asked.get("url"), asked.get("body")
    if method != "POST":
        raise BadEntry("invalid_method", f"method={shown(method)}: only POST is known", custom_id)
    if url not in URLS:
        raise BadEntry("invalid_url", f"url={shown(url)}: give one of {', '.join(URLS)}", custom_id)
    if not isinstance(body, dict):
        raise BadEntry("invalid_body", f"body={shown(body)}: give the request's body as an object", custom_id)
    if body.get("stream"):
        raise BadEntry("invalid_body", "a batch's answers are not streamed: leave 'stream' out", custom_id)
    if body.get("background"):
        raise BadEntry("invalid_body", "a batch waits for its answers: leave 'background' out", custom_id)
    return Entry(custom_id, url, msgspec.json.encode(body))


def answered(entry: Entry, status: int, body: bytes) -> dict[str, Any]:
    """Whatever the route said, an error too."""
    return {
        "id": new_id(ID),
        "custom_id": entry.custom_id,
        "response": {"status_code": status, "request_id": new_id("req_"), "body": msgspec.Raw(body or b"null")},
        "error": None,
    }


def refused(bad: BadEntry, number: int) -> dict[str, Any]:
    """`number` is the line's, from 1."""
    return {
        "id": new_id(ID),
        "custom_id": bad.custom_id,
        "response": None,
        "error": {"code": bad.code, "message": bad.message, "line": number},
    }
