"""Give routes what they share: the server, the client's identity, the decoded body, streaming."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.host.ids import make_id
from penstock.server.connections.body_memory import (
    SLOW_S,
    TRICKLE_BYTES,
    TRICKLE_S,
    BodyMemory,
    BodyReservation,
    run_without_gc,
)
from penstock.server.engines.direct import OpenBody
from penstock.server.handover.asked import is_prefill
from penstock.server.http import sse
from penstock.server.http.client import Client as Client
from penstock.server.http.decode import decode
from penstock.server.http.errors import ApiError, to_api_error, warn
from penstock.server.http.relay import CURRENT_RELAY, KIND_HEADER, MOVED, RELAY, Relay, split_body
from penstock.server.http.unknown_keys import UnknownKeys
from penstock.server.observe.trace import CURRENT
from penstock.server.openai.logprobs import encode_piecewise

if TYPE_CHECKING:
    from penstock.server.common.fields import SamplingBody
    from penstock.server.generation import Generation
    from penstock.server.model import ServedModel
    from penstock.server.state import Server
    from penstock.text.prompt_encoder import Encoded
    from penstock.types import BeamSearchParams, SamplingParams

RESERVATION = "body_reservation"  # scope key: the memory held by the body
IDENTITY = "client_identity"  # scope key: the request's Client
USAGE = "usage"  # scope key: the request's token counts
SEND = "send_past_middleware"  # scope key: the outermost `send`
OPEN_BODY = "open_body"  # scope key: the response's body as the connection writes it
POLL_S = 0.25
MAX_LOOP_LOGPROBS = 5_000  # max logprobs formatted on the event loop
Typed = TypeVar("Typed", bound=BaseModel)
Made = TypeVar("Made")
Handler = Callable[[Request], Awaitable[Response]]


def server_of(request: Request) -> Server:
    return cast("Server", request.app.state.server)


def client_of(request: Request) -> Client:
    return cast("Client", request.scope.get(IDENTITY, Client()))


def body_memory_of(request: Request) -> BodyMemory:
    return cast("BodyMemory", request.app.state.bodies)


async def read_body(request: Request, kind: type[Typed]) -> Typed:
    """Read the body as `kind`, off the event loop if it is large; a wrong one is a 400 that says why."""
    memory = body_memory_of(request)
    raw = await receive_body(request)
    split_body(request.scope, raw)
    unknown = UnknownKeys(server_of(request).config.unknown_fields == "refuse")
    body = await run_on_body(request, lambda: decode(raw, kind, memory.max_body_bytes, unknown))
    if (notice := unknown.make_warning()) is not None:
        warn(request, notice)
    if (trace := CURRENT.get()) is not None:
        trace.move("tokenize")
    return body


async def receive_body(request: Request) -> bytearray:
    """Read the whole body, within the memory for bodies; `release_body` gives that back."""
    reservation = request.scope[RESERVATION] = BodyReservation(body_memory_of(request), client_of(request).tenant)
    return await _receive(request, reservation)


async def _receive(request: Request, reservation: BodyReservation) -> bytearray:
    raw, more = bytearray(), True
    while more:
        message = await _next_message(request, reservation)
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body was cut short")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        await reservation.hold(len(raw) + len(chunk))
        raw += chunk
    return raw


async def _next_message(request: Request, reservation: BodyReservation) -> Message:
    if not reservation.num_bytes:  # a small body is never overdue
        return await request.receive()
    waiting = asyncio.ensure_future(request.receive())
    try:
        while True:
            done, _ = await asyncio.wait([waiting], timeout=POLL_S)
            if reservation.is_overdue:
                raise ApiError(
                    408,
                    f"the body took more than {SLOW_S:.0f} s, or {TRICKLE_S:.0f} s for its next "
                    f"{TRICKLE_BYTES // 1024} KiB, and others wait for memory: send it faster, or in "
                    "smaller parts",
                    headers={"Connection": "close"},
                )
            if done:
                return waiting.result()
    finally:
        waiting.cancel()


async def run_on_body(request: Request, work: Callable[[], Made]) -> Made:
    """Run `work` on the request's body, off the event loop if the body is large."""
    reservation: BodyReservation | None = request.scope.get(RESERVATION)
    if reservation is None or not reservation.num_bytes:
        return work()
    return await reservation.memory.run(work)


async def release_body(scope: Scope) -> None:
    """Release the memory of a request's body, once it is decoded or refused."""
    reservation: BodyReservation | None = scope.get(RESERVATION)
    if reservation is not None:
        await reservation.leave()


def new_id(prefix: str) -> str:
    return prefix + make_id()


def now() -> int:
    """Return the time for a response; a router's request has its own."""
    relay = CURRENT_RELAY.get()
    return int(time.time()) if relay is None else relay.created


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def run_formatting(num_logprobs: int, work: Callable[[], Made]) -> Made:
    """Run `work`, off the event loop if it formats many logprobs."""
    if num_logprobs <= MAX_LOOP_LOGPROBS:
        return work()
    return await asyncio.to_thread(run_without_gc, work)


async def format_whole(generation: Generation, work: Callable[[], dict[str, Any]]) -> Any:
    """Format a complete response with `work`; one with many logprobs is returned as encoded JSON."""
    if generation.num_logprobs <= MAX_LOOP_LOGPROBS:
        return work()
    return await asyncio.to_thread(run_without_gc, lambda: msgspec.Raw(encode_piecewise(work())))


async def cancel_on_disconnect(request: Request, work: Awaitable[Made]) -> Made:
    """Await `work`, and cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client disconnected")
        return task.result()
    except (ApiError, PenstockError) as error:
        error.__traceback__ = None  # its frames hold the body
        raise
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task  # breaks the cycle task, exception, frame


async def start_generation(
    request: Request,
    model: ServedModel,
    body: SamplingBody,
    prompts: Sequence[tuple[Encoded, SamplingParams | BeamSearchParams]],
    *,
    pool: bool = False,
) -> Generation:
    """Queue a request's prompts unless the client disconnects meanwhile, and release its body."""
    work = server_of(request).generate(model, client_of(request), body, prompts, pool=pool)
    waits = any(model.text.has_to_prepare(params) for _, params in prompts) or is_prefill()
    generation = await (cancel_on_disconnect(request, work) if waits else work)
    generation.open_body = request.scope.get(OPEN_BODY)
    request.scope[USAGE] = generation.usage
    generation.includes_applied = body.include_applied
    await release_body(request.scope)
    if relaxed := generation.relaxed.get("relaxed"):
        warn(request, f"the schema is relaxed: {', '.join(relaxed)}")
    if not pool:
        _warn_of_truncation(request, model, generation, prompts)
    return generation


def _warn_of_truncation(
    request: Request,
    model: ServedModel,
    generation: Generation,
    prompts: Sequence[tuple[Encoded, SamplingParams | BeamSearchParams]],
) -> None:
    for flight, (_, params) in zip(generation.flights, prompts):
        asked, left = params.max_tokens, model.text.intake.longest - len(flight.request.tokens)
        if asked is not None and asked > left:
            warn(request, f"max_tokens={asked} exceeds the {left} tokens left after the prompt: the output ends there")
            return


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(receive: Receive, work: Awaitable[Made]) -> Made:
    """Await `work` in this task, without the detour over one of its own; ClientDisconnect if the client disconnects."""
    task, is_gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        made = await work
    except asyncio.CancelledError:
        if not is_gone:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise ClientDisconnect from None
    finally:
        watching.cancel()
    return made


async def event_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    failed: Callable[[ApiError], bytes] = lambda error: sse.event(error.body()) + sse.DONE,
    media_type: str = sse.MEDIA_TYPE,
    begin: Callable[[OpenBody], None] | None = None,
) -> Response:
    """Stream `events`. An error before the first is an ordinary response; a later one becomes an event. `begin` gets
    the response when the first event is sent, to write others itself."""
    relay: Relay | None = request.scope.get(RELAY)
    if relay is not None:
        events = relay.mute(events)
    try:
        first = await run_until_disconnect(request.receive, _next_event(events))
    except BaseException as error:
        await events.aclose()
        if isinstance(error, ClientDisconnect):
            raise ApiError(499, "the client disconnected") from None
        if isinstance(error, (ApiError, PenstockError)):
            error.__traceback__ = None  # its frames hold the body
        raise

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first
            async for event in events:
                yield event
        except Exception as error:
            known = to_api_error(error)
            yield MOVED if relay is not None and relay.kind and known.status == 503 else failed(known)
        finally:
            await events.aclose()

    open_body: OpenBody | None = request.scope.get(OPEN_BODY)
    return EventResponse(
        body(),
        request.scope.get(SEND),
        media_type,
        None if begin is None or open_body is None else partial(begin, open_body),
        {} if relay is None or not relay.kind else {KIND_HEADER: relay.kind},
    )


class EventResponse(StreamingResponse):
    """Sends events past the middleware, which reads the start and the end of a response alone."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        send_event: Send | None,
        media_type: str,
        begin: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(events, media_type=media_type, headers={**sse.HEADERS, **(headers or {})})
        self._send_event, self._begin = send_event, begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await run_until_disconnect(receive, self.stream_response(send))

    async def stream_response(self, send: Send) -> None:
        send_event = self._send_event or send
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self.body_iterator:
            await send_event({"type": "http.response.body", "body": event, "more_body": True})
            if self._begin is not None:
                self._begin()
                self._begin = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _next_event(events: AsyncGenerator[bytes, None]) -> bytes:
    async for event in events:
        return event
    return b""
