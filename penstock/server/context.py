"""What every route is given: the server's state, the client's identity, the body in its type."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Scope

from penstock.errors import PenstockError
from penstock.server import sse
from penstock.server.decode import decode
from penstock.server.errors import ApiError, as_api_error
from penstock.server.logprobs import encode_in_parts
from penstock.server.notices import warn
from penstock.server.room import SLOW_S, TRICKLE_BYTES, TRICKLE_S, BodyRoom, Place, undisturbed
from penstock.server.unknown import UnknownKeys

if TYPE_CHECKING:
    from penstock.intake import Encoded
    from penstock.server.fields import SamplingBody
    from penstock.server.generation import Generation
    from penstock.server.model import ServedModel
    from penstock.server.state import Server
    from penstock.types import SamplingParams

PLACE = "body_place"  # in a request's scope: the room that its body takes
IDENTITY = "client_identity"  # in a request's scope: its Client
USAGE = "usage"  # in a request's scope: its tokens, once they are counted
LOOK_S = 0.25
MAX_LOOP_LOGPROBS = 5_000  # log probabilities of an answer that are put into its form on the loop
Typed = TypeVar("Typed", bound=BaseModel)
Made = TypeVar("Made")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Client:
    """The sender of a request. `tenant` is the name of its key, empty where there are no keys. A batch gives way to
    clients who wait for their answers."""

    tenant: str = ""
    is_admin: bool = False
    is_batch: bool = False


def server_of(request: Request) -> Server:
    state: Server = request.app.state.server
    return state


def client_of(request: Request) -> Client:
    client: Client = request.scope.get(IDENTITY, Client())
    return client


def room_of(request: Request) -> BodyRoom:
    room: BodyRoom = request.app.state.bodies
    return room


async def read(request: Request, kind: type[Typed]) -> Typed:
    """Read the body as `kind`; whatever is wrong with it is a 400 that says what. A large one is decoded aside."""
    room = room_of(request)
    place = request.scope[PLACE] = Place(room, client_of(request).tenant)
    raw = await _receive(request, place)
    unknown = UnknownKeys(server_of(request).config.unknown_fields == "refuse")
    body = await aside(request, lambda: decode(raw, kind, room.max_body_bytes, unknown))
    if (notice := unknown.notice()) is not None:
        warn(request, notice)
    return body


async def _receive(request: Request, place: Place) -> bytearray:
    raw, more = bytearray(), True
    while more:
        message = await _next_message(request, place)
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body was cut off")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        await place.hold(len(raw) + len(chunk))
        raw += chunk
    return raw


async def _next_message(request: Request, place: Place) -> Message:
    waiting = asyncio.ensure_future(request.receive())
    try:
        while True:
            done, _ = await asyncio.wait([waiting], timeout=LOOK_S)
            if place.is_overdue:
                raise ApiError(
                    408,
                    f"the body took more than {SLOW_S:.0f} s, or {TRICKLE_S:.0f} s for its next "
                    f"{TRICKLE_BYTES // 1024} KiB, and others wait for room: send it faster, or in "
                    "smaller parts",
                    headers={"Connection": "close"},
                )
            if done:
                return waiting.result()
    finally:
        waiting.cancel()


async def aside(request: Request, work: Callable[[], Made]) -> Made:
    """Do work on a request's body: off the loop if the body is large."""
    place: Place | None = request.scope.get(PLACE)
    if place is None or not place.num_bytes:
        return work()
    return await place.room.run(work)


async def release(scope: Scope) -> None:
    """Give back the room of a request's body, once it has been taken in or refused."""
    place: Place | None = scope.get(PLACE)
    if place is not None:
        await place.leave()


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def now() -> int:
    return int(time.time())


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def shaped(num_logprobs: int, work: Callable[[], Made]) -> Made:
    """Put an answer into its form: off the loop if it has many log probabilities."""
    if num_logprobs <= MAX_LOOP_LOGPROBS:
        return work()
    return await asyncio.to_thread(undisturbed, work)


async def shaped_whole(generation: Generation, work: Callable[[], dict[str, Any]]) -> Any:
    """Put an answer that has ended into its form. One with many log probabilities is JSON already."""
    if generation.num_logprobs <= MAX_LOOP_LOGPROBS:
        return work()
    return await asyncio.to_thread(undisturbed, lambda: msgspec.Raw(encode_in_parts(work())))


async def unless_gone(request: Request, work: Awaitable[Made]) -> Made:
    """Wait for work that ends when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away")
        return task.result()
    except (ApiError, PenstockError) as error:
        error.__traceback__ = None  # where a refusal comes from says nothing, and its frames hold the body
        raise
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task  # it holds its exception, which holds this frame and all that called it


async def begin(
    request: Request,
    model: ServedModel,
    body: SamplingBody,
    prompts: Sequence[tuple[Encoded, SamplingParams]],
    *,
    pool: bool = False,
) -> Generation:
    """Queue a request's prompts, unless the client goes away while they are prepared. The body's room is free then."""
    generating = server_of(request).generate(model, client_of(request), body, prompts, pool=pool)
    generation = await unless_gone(request, generating)
    request.scope[USAGE] = generation.usage
    await release(request.scope)
    if relaxed := generation.relaxed.get("relaxed"):
        warn(request, f"the schema is relaxed: {', '.join(relaxed)}")
    if not pool:
        _warn_of_length(request, model, generation, prompts)
    return generation


def _warn_of_length(
    request: Request, model: ServedModel, generation: Generation, prompts: Sequence[tuple[Encoded, SamplingParams]]
) -> None:
    """Say so where an answer ends before the length that was asked for."""
    for flight, (_, params) in zip(generation.flights, prompts):
        asked, room = params.max_tokens, model.taking.longest - len(flight.request.tokens)
        if asked is not None and asked > room:
            warn(request, f"max_tokens={asked} is more than the {room} that fit after the prompt: it ends there")
            return


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def event_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    failed: Callable[[ApiError], bytes] = lambda error: sse.event(error.body()) + sse.DONE,
    media_type: str = sse.MEDIA_TYPE,
) -> Response:
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
