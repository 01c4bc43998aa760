"""What every route is given: the server's state, the client's identity, the body in its type."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from penstock.server import sse
from penstock.server.errors import ApiError, as_api_error, invalid_body

if TYPE_CHECKING:
    from penstock.server.state import Server

MOST_MARKS = {b"{": 50_000, b"[": 50_000, b",": 2_000_000}     # in a body: reading more would hold up everyone
Typed = TypeVar("Typed", bound=BaseModel)
Made = TypeVar("Made")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Client:
    """Who asks. `tenant` is the name of its key, empty where there are no keys."""

    tenant: str = ""
    is_admin: bool = False


def server_of(request: Request) -> Server:
    state: Server = request.app.state.server
    return state


def client_of(request: Request) -> Client:
    client: Client = request.scope.get("client_identity", Client())
    return client


async def read(request: Request, kind: type[Typed]) -> Typed:
    """The body as `kind`; whatever is wrong with it is a 400 that says what."""
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError(400, "the body was cut off") from None
    for mark, most in MOST_MARKS.items():
        if len(raw) > most and raw.count(mark) > most:
            raise ApiError(400, f"the body has more than {most} {mark.decode()!r}: send less at once", code="invalid_json")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_body(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def now() -> int:
    return int(time.time())


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def unless_gone(request: Request, work: Awaitable[Made]) -> Made:
    """Wait for work that ends when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def event_stream(request: Request, events: AsyncGenerator[bytes, None],
                       failed: Callable[[ApiError], bytes] = lambda error: sse.event(error.body()) + sse.DONE,
                       media_type: str = sse.MEDIA_TYPE) -> Response:
    """A stream of events. What fails before the first of them is an ordinary error response; later it is an event."""
    try:
        first = await unless_gone(request, _first(events))
    except BaseException:
        await events.aclose()
        raise

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first
            async for event in events:
                yield event
        except Exception as error:
            yield failed(as_api_error(error))
        finally:
            await events.aclose()

    return StreamingResponse(body(), media_type=media_type, headers=sse.HEADERS)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    async for event in events:
        return event
    return b""
