"""/v1/files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.errors import shown
from penstock.server.context import client_of, json_response
from penstock.server.errors import ApiError
from penstock.server.files.listing import MAX_DIGITS, page_of
from penstock.server.files.store import MAX_AGE_S, FileStore, StoredFile, read_part
from penstock.server.files.upload import Upload

PURPOSE = "batch"
MIN_AGE_S = 3600
CHUNK_BYTES = 256 * 1024
MAX_LISTED = 10_000
MAX_FORM_BYTES = 1 << 20  # of an upload, around its file

_disk = ThreadPoolExecutor(2, thread_name_prefix="files")
Made = TypeVar("Made")


async def on_disk(work: Callable[[], Made]) -> Made:
    """Do work that waits for the disk."""
    try:
        return await asyncio.get_running_loop().run_in_executor(_disk, work)
    except OSError as error:
        raise ApiError(507, f"the server cannot store this: {error.strerror or error}", code="disk_failed") from error


async def upload_file(request: Request) -> Response:
    store, tenant = store_of(request), client_of(request).tenant
    store.check_number(tenant)
    upload = Upload(store, tenant, request.headers.get("content-type", "").encode("latin-1"))
    try:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the body was cut off")
            await on_disk(partial(upload.feed, message.get("body", b"")))
            if not message.get("more_body", False):
                break
        lifetime_s = _lifetime(upload.fields)
        return json_response((await on_disk(lambda: _finish(upload, store, tenant, lifetime_s))).as_json())
    finally:
        await on_disk(upload.close)


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


def _lifetime(fields: dict[str, str]) -> int:
    """Check the form's fields; seconds after which the file expires."""
    if "purpose" not in fields:
        raise ApiError(400, "missing required parameter: 'purpose'", param="purpose", code="missing_required_parameter")
    if fields["purpose"] != PURPOSE:
        raise ApiError(
            400,
            f"purpose={shown(fields['purpose'])}: files here are for batches; give {PURPOSE!r}",
            param="purpose",
            code="invalid_value",
        )
    anchor, seconds = fields.get("expires_after[anchor]", "created_at"), fields.get("expires_after[seconds]")
    if anchor != "created_at":
        raise ApiError(
            400, f"expires_after.anchor={shown(anchor)}: give 'created_at'", param="expires_after", code="invalid_value"
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
            f"expires_after.seconds={shown(seconds)}: give a number from {MIN_AGE_S} to {MAX_AGE_S}",
            param="expires_after",
            code="invalid_value",
        )
    return int(seconds)


async def files(request: Request) -> Response:
    asked, store, tenant = request.query_params, store_of(request), client_of(request).tenant

    def make_page() -> Response:
        found = [file for file in store.all_of(tenant) if asked.get("purpose") in (None, file.purpose)]
        return json_response(page_of(found, StoredFile.as_json, asked, MAX_LISTED, MAX_LISTED))

    return await on_disk(make_page)  # 10,000 take 50 ms


async def file(request: Request) -> Response:
    return json_response(_asked(request).as_json())


async def file_content(request: Request) -> Response:
    found, store = _asked(request), store_of(request)

    async def parts() -> AsyncIterator[bytes]:
        for offset in range(0, found.num_bytes, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, found.num_bytes - offset)
            yield await on_disk(partial(read_part, store.path_of(found.id), offset, num_bytes))

    headers = {
        "Content-Length": str(found.num_bytes),
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.filename, safe='')}",
    }
    return StreamingResponse(parts(), headers=headers, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    found = _asked(request)
    await on_disk(partial(store_of(request).delete, found))
    return json_response({"id": found.id, "object": "file", "deleted": True})


def store_of(request: Request) -> FileStore:
    store: FileStore | None = request.app.state.files
    if store is None:
        raise ApiError(503, "this server keeps no files")
    return store


def _asked(request: Request) -> StoredFile:
    return store_of(request).find(client_of(request).tenant, request.path_params["id"])
