"""Send one request to a server, its answer back, and go on elsewhere when the server is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from penstock.errors import Busy
from penstock.server.handover.router import PromptHandover
from penstock.server.http.context import run_until_disconnect
from penstock.server.http.errors import ApiError, to_api_error
from penstock.server.http.relay import KEY_HEADER, KIND_HEADER, RELAY_HEADER, RESUME_HEADER
from penstock.server.router.admission import FleetQueue, QueuedCall
from penstock.server.router.failures import encode_end, make_no_server_error, make_owner_error, refuse
from penstock.server.router.http_client import Headers, UpstreamFailed, UpstreamResponse
from penstock.server.router.marks import MarkedStream
from penstock.server.router.pool import UpstreamPool
from penstock.server.router.prompts import PromptFacts
from penstock.server.router.upstream import Upstream

log = logging.getLogger("penstock.router")
BUFFERED_BYTES = 4 << 20  # of an answer that is no stream, before any is passed on: until then it can be asked again
BYTES_PER_TOKEN = 4  # of prompts, for fair shares
MAX_COUNTED_BYTES = 1 << 20  # of an answer whose `usage` is read
MAX_REFUSAL_BYTES = 1 << 20
MAX_DEATHS = 3  # of servers that work on a request
RESUME_WAIT_S = 60.0  # for a server that a stream can go on at
RETRY_S = 0.2
RESEND_WAIT_S = 3.0  # for a server that a request can begin at
REFUSALS = (429, 503, 529)
DONE, DONE_BYTES = b"[DONE]", 32  # of the end of a stream, with its line ends
DONE_PATHS = ("/v1/completions", "/v1/chat/completions")
STREAMS = (b"text/event-stream", b"application/x-ndjson")
DROPPED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"transfer-encoding",
        b"te",
        b"trailer",
        b"upgrade",
        b"proxy-connection",
        b"content-length",
        b"date",
        b"server",
        b"x-request-id",
        KIND_HEADER.encode(),
    }
)
_RESPONSE_ID = re.compile(rb'"id":"(resp_[0-9A-Za-z]{1,64})"')


def drop_hops(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Drop what concerns one connection alone: headers of that kind, and those that `Connection` names."""
    named = {one.strip().lower() for name, value in headers if name == b"connection" for one in value.split(b",")}
    return [one for one in headers if one[0] not in DROPPED and one[0] not in named]


@dataclass
class Call:
    """A client's request, as it is sent to servers."""

    method: str
    path: str
    target: bytes
    headers: Headers
    body: bytes
    facts: PromptFacts
    owner: Upstream | None = None  # the only server that can answer
    learns_id: bool = False  # the answer is something that its server keeps
    router_key: bytes | None = None
    tenant: str = ""
    relay: bytes = field(default_factory=lambda: f"{secrets.token_hex(16)}.{int(time.time())}".encode())

    @property
    def is_repeatable(self) -> bool:
        """True if nothing is changed by asking the same server twice."""
        return self.method == "GET" or (self.facts.refers_to or "").startswith("resp")

    def list_headers(self, num_resume_bytes: int) -> Headers:
        if self.router_key is None or not self.facts.is_stream:
            return self.headers
        more: Headers = [(KEY_HEADER, self.router_key), (RELAY_HEADER, self.relay)]
        if num_resume_bytes:
            more.append((RESUME_HEADER, b"%d" % num_resume_bytes))
        return [*self.headers, *more]


class _Moved(Exception):
    """The server asks to go on elsewhere."""


class Forward:
    """The response to a client."""

    def __init__(self, pool: UpstreamPool, call: Call, queue: FleetQueue | None = None) -> None:
        """Without `queue` the request goes to a server at once."""
        self._pool, self._call, self._queue = pool, call, queue
        self._handover = PromptHandover(pool, call)
        self._place: tuple[Upstream, int] | None = None  # a server that has room, and the work it was given
        self._served_s = -math.inf  # when a server last might have taken it
        self._num_output = 0  # tokens, as far as they can be counted
        self._tried: set[Upstream] = set()
        self._num_deaths = 0
        self._refusal: tuple[int, Headers, bytes] | None = None
        self._stream: MarkedStream | None = None
        self._kind = ""
        self._has_begun = False  # the client has the head
        self._hopeless: set[Upstream] = set()  # servers with another model
        self._deadline_s: float | None = None  # of the search for a server that goes on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await run_until_disconnect(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._take_turn():
                while (upstream := await self._choose()) is not None:
                    if await self._try(upstream, send):
                        return
                await self._give_up(scope, receive, send)
        except (ApiError, Busy) as error:
            await self._fail(to_api_error(error), scope, receive, send)

    @contextlib.asynccontextmanager
    async def _take_turn(self) -> AsyncIterator[None]:
        """Wait until a server has room, and tell the queue when the answer ends."""
        call, queue = self._call, self._queue
        if queue is None:
            yield
            return
        kind = call.facts.model, call.facts.session, None if call.owner is None else call.owner.number
        try:
            await queue.enter(QueuedCall(call.tenant, call.facts.num_bytes // BYTES_PER_TOKEN, kind, self._take_place))
            yield
        finally:
            if self._place is not None:
                self._pool.end(self._place[0], call.facts, self._place[1])
            if self._stream is not None:
                self._num_output = sum(len(part.tokens) for part in self._stream.parts.values())
            queue.end(call.tenant, self._num_output, has_answer=self._has_begun)

    def _take_place(self) -> bool:
        """Take a place on a server; False if the request has to wait for one. One that waited already goes on waiting
        when all servers are gone for a while."""
        chosen, is_served = self._pool.choose_with_room(self._call.facts, self._call.owner)
        now = time.monotonic()
        if chosen is not None:
            self._handover.note(chosen)
            self._place = chosen, self._pool.begin(chosen, self._call.facts)
        elif is_served:
            self._served_s = now
        return chosen is not None or now - self._served_s > RESUME_WAIT_S

    async def _choose(self) -> Upstream | None:
        call = self._call
        if self._place is not None:
            return self._place[0]
        if self._num_deaths >= MAX_DEATHS:
            return None
        if call.owner is not None:
            return await self._choose_owner(call.owner)
        if self._has_begun:
            return await self._choose_next()
        chosen = self._pool.choose(call.facts, self._tried)
        if chosen is None and self._refusal is None:
            self._tried.clear()
            chosen = await self._pool.wait_for_any(call.facts, self._tried, RESEND_WAIT_S)
        return chosen

    async def _choose_owner(self, owner: Upstream) -> Upstream | None:
        """Choose the only server that can answer, also when it is there again after a connection broke off."""
        if owner not in self._tried:
            return owner
        if self._refusal is not None or not self._call.is_repeatable:
            return None
        wait_s = RESUME_WAIT_S if self._has_begun else RESEND_WAIT_S
        return owner if await self._pool.wait_for(owner, wait_s) else None

    async def _choose_next(self) -> Upstream | None:
        """Choose a server for the rest of a stream, waiting for one if need be."""
        now = time.monotonic()
        self._deadline_s = self._deadline_s or now + RESUME_WAIT_S
        chosen = self._pool.choose(self._call.facts, self._tried)
        if chosen is None:
            self._tried = set(self._hopeless)
            await asyncio.sleep(RETRY_S)
            chosen = await self._pool.wait_for_any(self._call.facts, self._tried, self._deadline_s - now)
        return chosen

    async def _try(self, upstream: Upstream, send: Send) -> bool:
        """Ask a server; True if the client has its whole answer."""
        handed_over = await self._handover.prepare(upstream)
        facts = replace(self._call.facts, num_bytes=0) if handed_over else self._call.facts
        place, self._place = self._place, None
        work = self._pool.begin(upstream, facts) if place is None else place[1]
        try:
            return await self._ask(upstream, send, handed_over)
        except _Moved:
            log.info("%s: a stream goes on elsewhere", upstream.name)
            upstream.refuse("it stops")
        except UpstreamFailed as error:
            upstream.die(str(error))
            self._num_deaths += 1
            log.warning("%s: %s %s broke off: %s", upstream.name, self._call.method, self._call.path, error)
            if self._has_begun and (self._stream is None or not self._stream.can_resume):
                raise ApiError(
                    502, "the server of this answer was lost: send the request again", code="upstream_lost"
                ) from None
        finally:
            self._pool.end(upstream, self._call.facts, work)
        self._tried.add(upstream)
        return False

    async def _ask(self, upstream: Upstream, send: Send, more: Headers) -> bool:
        call, resume = self._call, b""
        if self._stream is not None:
            self._stream.restart()
            resume = self._stream.resume(self._kind)
        parts = [resume, call.body] if resume else [call.body]
        headers = [*call.list_headers(len(resume)), *more]
        response = await upstream.client.send(call.method, call.target, headers, [one for one in parts if one])
        try:
            upstream.responses[response.status] += 1
            if response.status in REFUSALS or self._has_begun and response.status != 200:
                await self._take_refusal(upstream, response)
                return False
            if self._has_begun:
                self._pool.num_continued += 1
                self._deadline_s = None
            kind = response.find(KIND_HEADER.encode()).decode("latin-1")
            if kind and self._stream is None and call.router_key is not None:
                self._stream, self._kind = MarkedStream(), kind
            await self._pass_on(upstream, response, send)
            return True
        finally:
            response.close()

    async def _take_refusal(self, upstream: Upstream, response: UpstreamResponse) -> None:
        body = await response.read(MAX_REFUSAL_BYTES)
        if response.status not in REFUSALS:
            self._hopeless.add(upstream)
        elif response.status != 429:
            upstream.refuse(f"it says {response.status}")
        self._refusal = response.status, response.headers, body
        self._tried.add(upstream)

    async def _pass_on(self, upstream: Upstream, response: UpstreamResponse, send: Send) -> None:
        """Send an answer to the client; UpstreamFailed or _Moved if it breaks off."""
        if self._stream is not None:
            return await self._forward_stream(upstream, response, self._stream, send)
        parts = response.parts()
        if response.find(b"content-type").split(b";")[0].strip() in STREAMS:
            await self._send_head(response, None, send)
            end = b""
            async for part in parts:
                end = (end + part)[-DONE_BYTES:]
                self._num_output += part.count(b"\n\n") or part.count(b"\n")
                await _send_body(send, part)
            if response.ends_with_connection and self._call.path in DONE_PATHS and DONE not in end:
                raise UpstreamFailed("its stream ended without [DONE]")
            return await _send_body(send, b"", False)
        held, is_whole = await _collect(parts, BUFFERED_BYTES)
        if response.status == 200 and is_whole:
            self._learn(upstream, held)
        await self._send_head(response, len(held) if is_whole else None, send)
        await _send_body(send, held, not is_whole)
        if not is_whole:
            async for part in parts:
                await _send_body(send, part)
            await _send_body(send, b"", False)

    async def _forward_stream(
        self, upstream: Upstream, response: UpstreamResponse, stream: MarkedStream, send: Send
    ) -> None:
        has_id = not self._call.learns_id
        async for part in response.parts():
            if shown := stream.push(part):
                if not has_id and (found := _RESPONSE_ID.search(shown)) is not None:
                    has_id = True
                    self._pool.sticky.put(found[1].decode(), upstream)
                if not self._has_begun:
                    await self._send_head(response, None, send)
                await _send_body(send, shown)
            if stream.has_moved:
                raise _Moved
        if not self._has_begun:
            await self._send_head(response, None, send)
        await _send_body(send, stream.finish(), False)

    def _learn(self, upstream: Upstream, body: bytes) -> None:
        """Note what an answer says of its id and of its tokens."""
        if self._call.learns_id:
            with contextlib.suppress(msgspec.DecodeError):
                self._pool.sticky.put(msgspec.json.decode(body, type=_Identified).id, upstream)
        if self._queue is not None and len(body) <= MAX_COUNTED_BYTES:
            with contextlib.suppress(msgspec.DecodeError):
                usage = msgspec.json.decode(body, type=_Used).usage
                self._num_output = usage.completion_tokens or usage.output_tokens

    async def _send_head(self, response: UpstreamResponse, length: int | None, send: Send) -> None:
        headers = drop_hops(response.headers)
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        self._has_begun = True
        await send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _give_up(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer that no server can."""
        if self._refusal is not None and not self._has_begun:
            status, headers, body = self._refusal
            kept = drop_hops(headers)
            kept.append((b"content-length", b"%d" % len(body)))
            await send({"type": "http.response.start", "status": status, "headers": kept})
            return await _send_body(send, body, False)
        if self._num_deaths >= MAX_DEATHS:
            raise ApiError(
                502,
                f"{self._num_deaths} servers broke off while they worked on this request: it is not sent to others",
                code="upstream_lost",
            )
        if self._call.owner is not None:
            raise make_owner_error()
        states = "; ".join(f"{one.name}: {one.state}" for one in self._pool) if scope.get("sees_all") else ""
        raise make_no_server_error(states)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._has_begun:
            return await refuse(error, self._call.path)(scope, receive, send)
        if self._stream is None:  # whole events may be followed by half of one
            await _send_body(send, b"\n\n")
        await _send_body(send, encode_end(error, self._call.path), False)


class _Identified(msgspec.Struct):
    id: str


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Used(msgspec.Struct):
    usage: _Usage


async def _collect(parts: AsyncIterator[bytes], max_bytes: int) -> tuple[bytes, bool]:
    """Collect a body; False if more than `max_bytes` are left to come."""
    held = bytearray()
    async for part in parts:
        held += part
        if len(held) > max_bytes:
            return bytes(held), False
    return bytes(held), True


async def _send_body(send: Send, data: bytes, has_more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": has_more})
