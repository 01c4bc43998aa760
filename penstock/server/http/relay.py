"""Streams that `penstock route` may continue on another server, token for token.

The router proves itself by its key. It gives each request a secret, from which seeds and ids are made, so that two
servers make the same. A stream then has marks: lines that say which tokens the events before them show. A router that
has lost a server sends the request and those tokens to another, which repeats them in silence and goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING

import msgspec

from penstock.host.ids import IdSource
from penstock.server.handover.asked import HANDOVER, read_handover
from penstock.server.http.client import Client
from penstock.server.http.errors import ApiError
from penstock.types import Delta, Logprob, StreamDelta

if TYPE_CHECKING:
    from starlette.types import Scope

    from penstock.server.engines.direct import Encode, OpenBody
    from penstock.server.engines.in_flight import InFlightRequest

KEY_HEADER, RELAY_HEADER, RESUME_HEADER = b"penstock-router-key", b"penstock-relay", b"penstock-resume-bytes"
TENANT_HEADER, ADMIN_HEADER, KIND_HEADER = b"penstock-router-tenant", b"penstock-router-admin", "penstock-relay-kind"
FACTS_HEADER = "penstock-server-facts"  # of an answer to the router's health check
MARK = b": penstock "  # begins the line of a mark, which no event does
MOVED = MARK + b"null\n"  # this server stops: the stream goes on elsewhere
RELAY = "relay"  # scope key: the request's Relay
MAX_RESUME_BYTES = 16 << 20
REPLAYED_TOKENS = 256  # before others get a turn
_FORM = re.compile(rb"([0-9a-f]{32})\.([0-9]{1,12})")


class ShownPart(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one answer, as far as they were shown."""

    number: int  # of the prompt
    sibling: int
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    forced_closing: bool = False
    num_cached: int = 0
    logprobs: list[list[tuple[int, float, int | None]]] = []  # per token: id, log probability, rank

    @property
    def ends(self) -> bool:
        """True if no tokens can be added."""
        return self.finish_reason is not None or self.forced_closing


class Handover(msgspec.Struct, frozen=True):
    """The part of a stream that the client has, of another server."""

    kind: str  # of the model there
    parts: list[ShownPart]


class ServerFacts(msgspec.Struct, frozen=True):
    """A server's cache and rows, as it tells a router. A cache has another name once it was emptied."""

    cache: str
    cache_tokens: int | None = None  # None: a store keeps more
    rows: int | None = None  # None: a model is loaded when it is asked for


class Relay:
    """One request of a router: `secret` and `created` are the same on every server that works on it."""

    def __init__(self, secret: str, created: int) -> None:
        self.secret, self.created = secret, created
        self.ids = IdSource(secret)
        self.kind = ""  # of the model, once the request is queued
        self.resume: Handover | None = None
        self.is_muted = False
        self._shown: list[ShownPart] = []
        self._has_begun = False

    def seed(self, number: int) -> int:
        digest = hashlib.blake2b(f"{self.secret}:seed:{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def split(self, body: bytearray, num_bytes: int) -> None:
        """Take what is to be resumed from the beginning of a body."""
        if not 0 < num_bytes <= min(len(body), MAX_RESUME_BYTES):
            raise ApiError(400, f"{RESUME_HEADER.decode()}: {num_bytes} is not valid: the body has {len(body)} bytes")
        try:
            self.resume = msgspec.json.decode(bytes(body[:num_bytes]), type=Handover)
        except msgspec.DecodeError as error:
            raise ApiError(400, f"what is to be resumed cannot be read: {error}") from None
        del body[:num_bytes]
        self.is_muted = True

    async def restore(self, flights: Sequence[InFlightRequest]) -> None:
        """Give requests the tokens that the client has."""
        for part in () if self.resume is None else self.resume.parts:
            if not 0 <= part.number < len(flights) or part.sibling not in flights[part.number].outputs:
                raise ApiError(400, "what is to be resumed does not fit the request")
            for delta in _split(part, flights[part.number].request.id):
                flights[part.number].replay(delta)
                await asyncio.sleep(0)
        for flight in flights:
            flight.keep_open_parts()

    def cut(self, flight: InFlightRequest, batch: list[StreamDelta]) -> Iterator[list[StreamDelta]]:
        """Yield what the client has, and then what it has not."""
        num_old = min(flight.num_muted, len(batch))
        flight.num_muted -= num_old
        self.is_muted = True
        if num_old:
            yield batch[:num_old]
        self.is_muted = False
        if num_old < len(batch):
            self._show(flight.number, batch[num_old:])
            yield batch[num_old:]

    def mark_each(self, flight: InFlightRequest, encode: Encode) -> Encode:
        """Return an encoder that marks its events, with the ids of this request."""
        context = copy_context()

        def encode_with_mark(deltas: list[StreamDelta], join: bool) -> bytes:
            data = context.run(encode, deltas, join)
            self._show(flight.number, deltas)
            return data + self._take_mark()

        return encode_with_mark

    def _show(self, number: int, deltas: Iterable[StreamDelta]) -> None:
        """Note the deltas that the last events show."""
        for one in deltas:
            last = self._shown[-1] if self._shown else None
            ends = one.finish_reason is not None or one.forced_closing
            logprobs = [[(id, each.logprob, each.rank) for id, each in place.items()] for place in one.logprobs]
            if last is not None and (last.number, last.sibling) == (number, one.index) and not (ends or last.ends):
                last.tokens.extend(one.token_ids)
                last.logprobs.extend(logprobs)
            else:
                ending = (one.finish_reason, one.stop_reason, one.forced_closing, one.num_cached_tokens)
                self._shown.append(ShownPart(number, one.index, list(one.token_ids), *ending, logprobs))

    def _take_mark(self, begins: bool = False) -> bytes:
        """Return the line that says what the events before it show; empty if nothing is new."""
        if not self._shown and (not begins or self._has_begun):
            return b""
        shown, self._shown, self._has_begun = self._shown, [], True
        return MARK + msgspec.json.encode(shown) + b"\n"

    def commit(self, body: OpenBody | None) -> None:
        """Mark the events so far as complete: they are sent, since whoever makes them asks for more."""
        if body is not None and body.has_begun and not self.is_muted and (mark := self._take_mark(begins=True)):
            body.write(mark)
        if not self._has_begun and self.resume is not None:
            self._has_begun = True  # the client has the first events
        self.is_muted = False

    async def mute(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Leave out the events that the client has."""
        try:
            async for event in events:
                if not self.is_muted:
                    yield event
        finally:
            await events.aclose()


def _split(part: ShownPart, id: str) -> Iterator[Delta]:
    """Yield the part's deltas, of a few tokens each."""
    for begin in range(0, max(1, len(part.tokens)), REPLAYED_TOKENS):
        end = begin + REPLAYED_TOKENS
        places = part.logprobs[begin:end]
        is_last = end >= len(part.tokens)
        yield Delta(
            id,
            part.sibling,
            tuple(part.tokens[begin:end]),
            tuple({token: Logprob(value, rank) for token, value, rank in place} for place in places),
            finish_reason=part.finish_reason if is_last else None,
            stop_reason=part.stop_reason if is_last else None,
            forced_closing=part.forced_closing and is_last,
            num_cached_tokens=part.num_cached,
        )


CURRENT_RELAY: ContextVar[Relay | None] = ContextVar("penstock_relay", default=None)


class RouterAccess:
    """Tells requests of the router, which has a key of its own, from those that only say so."""

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None else key.encode()

    def knows(self, scope: Scope) -> bool:
        """True if a request has the router's key."""
        given = _find(scope, KEY_HEADER)
        return given is not None and self._key is not None and hmac.compare_digest(given, self._key)

    def read(self, scope: Scope) -> tuple[bool, Client | None]:
        """True if the router's key is given, and the client that it vouches for; a wrong key is an error."""
        given = _find(scope, KEY_HEADER)
        if given is None:
            return False, None
        if self._key is None or not hmac.compare_digest(given, self._key):
            raise ApiError(
                403,
                "the router's key is not this server's: give both the same --router-key-file"
                if self._key is not None
                else "this server has no --router-key-file: give it the router's",
                code="wrong_router_key",
            )
        relay = _FORM.fullmatch(_find(scope, RELAY_HEADER) or b"")
        if relay is not None:
            scope[RELAY] = Relay(relay[1].decode(), int(relay[2]))
        if (asked := read_handover(scope)) is not None:
            scope[HANDOVER] = asked
        tenant, is_admin = _find(scope, TENANT_HEADER), _find(scope, ADMIN_HEADER) is not None
        return True, None if tenant is None else Client(tenant.decode("utf-8", "replace"), is_admin)


def split_body(scope: Scope, body: bytearray) -> None:
    """Take what is to be resumed from the body of a router's request."""
    relay: Relay | None = scope.get(RELAY)
    given = None if relay is None else _find(scope, RESUME_HEADER)
    if relay is not None and given is not None:
        relay.split(body, int(given) if given.isdigit() and len(given) < 10 else 0)


def _find(scope: Scope, header: bytes) -> bytes | None:
    return next((bytes(value) for name, value in scope["headers"] if name == header), None)


def detach(scope: Scope) -> None:
    """Leave a request to this server alone: it goes on without its client."""
    scope.pop(RELAY, None)
    CURRENT_RELAY.set(None)
