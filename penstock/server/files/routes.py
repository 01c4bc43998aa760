"""/v1/files: receive, list and delete files."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar
from urllib.parse import quote as quote_url

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.errors import quote
from penstock.server.files.store import MAX_AGE_S, FileStore, StoredFile, append, new_file_id, read_range, remove_file
from penstock.server.http.context import client_of, json_response
from penstock.server.http.errors import ApiError

MAX_DIGITS = 9
ORDERS = ("asc", "desc")
Object = TypeVar("Object")
MAX_PARTS = 16
MAX_FIELD_BYTES = 4096
MAX_PREAMBLE_BYTES = 4096
MAX_NAME_CHARS = 255
BUFFER_BYTES = 64 * 1024
FORM = "multipart/form-data"
PURPOSE = "batch"
MIN_AGE_S = 3600
CHUNK_BYTES = 256 * 1024
MAX_LISTED = 10_000
MAX_FORM_BYTES = 1 << 20  # of an upload, beside its file
_disk = ThreadPoolExecutor(2, thread_name_prefix="files")
Made = TypeVar("Made")


def make_page(
    objects: Sequence[Object],
    format: Callable[[Object], dict[str, Any]],
    query: Mapping[str, str],
    max_listed: int,
    default: int,
    id_of: Callable[[Object], str] = attrgetter("id"),
) -> dict[str, Any]:
    """Make the page of `objects` (oldest first) that `after`, `limit` and `order` select; only its objects are
    formatted."""
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise ApiError(
            400, f"order={quote(order)}: give one of {', '.join(ORDERS)}", param="order", code="invalid_value"
        )
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= MAX_DIGITS and 1 <= int(limit) <= max_listed):
        raise ApiError(
            400, f"limit={quote(limit)}: give a number from 1 to {max_listed}", param="limit", code="invalid_value"
        )
    rest = list(objects if order == "asc" else reversed(objects))
    if query.get("after"):
        ids = [id_of(one) for one in rest]
        if query["after"] not in ids:
            raise ApiError(
                400, f"after={quote(query['after'])} is none of the list's ids", param="after", code="invalid_value"
            )
        rest = rest[ids.index(query["after"]) + 1 :]
    page = [format(one) for one in rest[: int(limit)]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(rest) > len(page),
    }


logging.getLogger("python_multipart").setLevel(logging.ERROR)  # errors go to the client


class Upload:
    """One upload. `feed` and `finish` block on the disk; `close` must follow in any case."""

    def __init__(self, store: FileStore, tenant: str, content_type: bytes) -> None:
        self.id = new_file_id()
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self.is_complete = False  # the last boundary has arrived
        self._store, self._tenant = store, tenant
        self._path = store.unfinished_path(self.id)
        self._parser = _make_parser(
            content_type,
            {
                "on_part_begin": self._begin_part,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_end": self._end,
            },
        )
        self._num_fed = self._num_parts = 0
        self._header = b"", b""
        self._disposition = b""
        self._field: str | None = None  # the part's name, unless it is the file
        self._value = bytearray()
        self._buffer = bytearray()  # file data
        self._is_kept = False

    def feed(self, data: bytes) -> None:
        if self.is_complete:
            return  # ignore an epilogue
        self._num_fed += len(data)
        if data.count(self._parser.boundary) > MAX_PARTS:  # the parser takes 1 us each
            raise _make_error(f"its boundary occurs more than {MAX_PARTS} times")
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _make_error(str(error)) from None
        if not self._num_parts and self._num_fed > MAX_PREAMBLE_BYTES:
            raise _make_error("no part begins")

    def finish(self) -> None:
        """Check that the upload is complete, and move the data to its place."""
        if not self.is_complete:
            raise _make_error("its last boundary is missing")
        if self.filename is None:
            raise ApiError(
                400,
                "missing required parameter: 'file'; send it as a part with a filename",
                param="file",
                code="missing_required_parameter",
            )
        self._flush()
        if not self.num_bytes:
            raise ApiError(
                400, "the file is empty: send one with a request on each line", param="file", code="invalid_value"
            )
        handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(self._path, self._store.path_of(self.id))

    def keep(self) -> None:
        """Keep the file and its reserved bytes: it is recorded."""
        self._is_kept = True

    def close(self) -> None:
        if not self._is_kept:
            remove_file(self._path)
            remove_file(self._store.path_of(self.id))
            self._store.release(self._tenant, self.num_bytes)
            self._is_kept = True

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _make_error(f"it has more than {MAX_PARTS} parts")
        self._field, self._disposition = None, b""
        self._value.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header = self._header[0] + data[start:end], self._header[1]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = self._header[0], self._header[1] + data[start:end]

    def _end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]
        self._header = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _make_error("a part has no name")
        name = options[b"name"].decode(errors="replace")
        if b"filename" not in options:
            self._field = name
        elif name != "file" or self.filename is not None:
            raise ApiError(
                400,
                f"there is a file in the part {quote(name)}: send one file, in the part 'file'",
                param="file",
                code="invalid_value",
            )
        else:
            self.filename = _clean_name(options[b"filename"])

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._buffer += data[start:end]
            if self.num_bytes + len(self._buffer) > self._store.max_file_bytes:
                raise ApiError(
                    413,
                    f"the file is larger than {self._store.max_file_bytes} bytes: split it",
                    param="file",
                    code="file_too_large",
                    headers={"Connection": "close"},
                )
            if len(self._buffer) >= BUFFER_BYTES:
                self._flush()
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise ApiError(
                400,
                f"the field {quote(self._field)} has more than {MAX_FIELD_BYTES} bytes: shorten it",
                code="invalid_value",
            )

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self.is_complete = True

    def _flush(self) -> None:
        self._store.reserve(self._tenant, len(self._buffer))
        self.num_bytes += len(self._buffer)
        append(self._path, bytes(self._buffer))
        self._buffer.clear()


def _make_parser(content_type: bytes, calls: dict[str, object]) -> MultipartParser:
    kind, options = parse_options_header(content_type)
    if kind != FORM.encode() or b"boundary" not in options:
        raise ApiError(
            415,
            f"Content-Type: {quote(content_type.decode('latin-1'))}: send the file as {FORM} with a "
            "boundary, as OpenAI's clients do",
            code="not_a_form",
        )
    try:
        return MultipartParser(options[b"boundary"], calls)  # type: ignore[arg-type]
    except FormParserError as error:
        raise _make_error(str(error)) from None


def _clean_name(name: bytes) -> str:
    """Make the file name printable, on one line."""
    text = name.decode(errors="replace")
    return "".join(char if char.isprintable() else "_" for char in text[:MAX_NAME_CHARS]) or "file"


def _make_error(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid {FORM}: {why}", code="invalid_form", headers={"Connection": "close"})


async def run_on_disk(work: Callable[[], Made]) -> Made:
    try:
        return await asyncio.get_running_loop().run_in_executor(_disk, work)
    except OSError as error:
        raise ApiError(507, f"cannot store this: {error.strerror or error}", code="disk_failed") from error


async def upload_file(request: Request) -> Response:
    store, tenant = store_of(request), client_of(request).tenant
    store.check_number(tenant)
    upload = Upload(store, tenant, request.headers.get("content-type", "").encode("latin-1"))
    try:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the body was cut short")
            await run_on_disk(partial(upload.feed, message.get("body", b"")))
            if not message.get("more_body", False):
                break
        lifetime_s = _read_lifetime(upload.fields)
        return json_response((await run_on_disk(lambda: _finish(upload, store, tenant, lifetime_s))).as_json())
    finally:
        await run_on_disk(upload.close)


def _finish(upload: Upload, store: FileStore, tenant: str, lifetime_s: int) -> StoredFile:
    upload.finish()
    file = store.make(
        id=upload.id,
        tenant=tenant,
        filename=upload.filename or "",
        purpose=PURPOSE,
        num_bytes=upload.num_bytes,
        lifetime_s=lifetime_s,
    )
    store.add(file)
    upload.keep()
    return file


def _read_lifetime(fields: dict[str, str]) -> int:
    """Check the form's fields; return the seconds until the file expires."""
    if "purpose" not in fields:
        raise ApiError(400, "missing required parameter: 'purpose'", param="purpose", code="missing_required_parameter")
    if fields["purpose"] != PURPOSE:
        raise ApiError(
            400,
            f"purpose={quote(fields['purpose'])}: give {PURPOSE!r}, files are for batches only",
            param="purpose",
            code="invalid_value",
        )
    anchor, seconds = fields.get("expires_after[anchor]", "created_at"), fields.get("expires_after[seconds]")
    if anchor != "created_at":
        raise ApiError(
            400, f"expires_after.anchor={quote(anchor)}: give 'created_at'", param="expires_after", code="invalid_value"
        )
    if seconds is None:
        return MAX_AGE_S
    if not (
        seconds.isascii()
        and seconds.isdigit()
        and len(seconds) <= MAX_DIGITS
        and MIN_AGE_S <= int(seconds) <= MAX_AGE_S
    ):
        raise ApiError(
            400,
            f"expires_after.seconds={quote(seconds)}: give a number from {MIN_AGE_S} to {MAX_AGE_S}",
            param="expires_after",
            code="invalid_value",
        )
    return int(seconds)


async def files(request: Request) -> Response:
    asked, store, tenant = request.query_params, store_of(request), client_of(request).tenant

    def list_files() -> Response:
        found = [file for file in store.list_for(tenant) if asked.get("purpose") in (None, file.purpose)]
        return json_response(make_page(found, StoredFile.as_json, asked, MAX_LISTED, MAX_LISTED))

    return await run_on_disk(list_files)  # 10,000 take 50 ms


async def file(request: Request) -> Response:
    return json_response(_find_requested(request).as_json())


async def file_content(request: Request) -> Response:
    found, store = _find_requested(request), store_of(request)

    async def parts() -> AsyncIterator[bytes]:
        for offset in range(0, found.num_bytes, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, found.num_bytes - offset)
            yield await run_on_disk(partial(read_range, store.path_of(found.id), offset, num_bytes))

    headers = {
        "Content-Length": str(found.num_bytes),
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote_url(found.filename, safe='')}",
    }
    return StreamingResponse(parts(), headers=headers, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    found = _find_requested(request)
    await run_on_disk(partial(store_of(request).delete, found))
    return json_response({"id": found.id, "object": "file", "deleted": True})


def store_of(request: Request) -> FileStore:
    store: FileStore | None = request.app.state.files
    if store is None:
        raise ApiError(503, "files are not available on this server")
    return store


def _find_requested(request: Request) -> StoredFile:
    return store_of(request).find(client_of(request).tenant, request.path_params["id"])
