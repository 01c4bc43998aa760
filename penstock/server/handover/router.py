"""The router's part: a long prompt is computed by a prefill server before a decode server gets the request."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.server.config import DECODE, PREFILL
from penstock.server.handover.asked import PREFILL_HEADER, TAKE_HEADER, HandedOver
from penstock.server.handover.prefill import ComputedPrompts
from penstock.server.http.relay import KEY_HEADER
from penstock.server.router.http_client import Headers, UpstreamFailed
from penstock.server.router.prompts import PART_BYTES

if TYPE_CHECKING:
    from penstock.server.router.forward import Call
    from penstock.server.router.pool import UpstreamPool
    from penstock.server.router.upstream import Upstream

log = logging.getLogger("penstock.router")
MIN_BYTES = 256  # of a prompt that a decode server does not know; with fewer, its own step is hardly longer
MAX_ANSWER_BYTES = 64 << 10
REFUSALS = (429, 503, 529)
BACKGROUND = b'"background"'  # in the body of a response that outlives its request
PATHS = frozenset(
    f"{prefix}{path}"
    for prefix, paths in (
        ("/v1", ("/chat/completions", "/completions", "/messages", "/responses")),
        ("", ("/chat/completions", "/completions", "/completion", "/generate", "/generate_stream", "/responses")),
        ("/api", ("/chat", "/generate")),
    )
    for path in paths
)


class _Answer(msgspec.Struct):
    handed_over: ComputedPrompts


class PromptHandover:
    """One request's prompt, on its way from a prefill server to a decode server."""

    def __init__(self, pool: UpstreamPool, call: Call) -> None:
        self._pool, self._call = pool, call
        self._done: HandedOver | None = None
        self._known: dict[Upstream, int] = {}  # parts of the prompt that a server had before it was given this work

    def note(self, upstream: Upstream) -> None:
        """Take note of what a server knows of the prompt, before it is counted as sent there."""
        self._known[upstream] = upstream.prefixes.count(self._call.facts.digests)

    async def prepare(self, upstream: Upstream) -> Headers:
        """Have the prompt computed where that pays; returns the headers that tell `upstream` of it."""
        if self._done is None and self._is_wanted(upstream):
            await self._compute()
        if self._done is None or upstream.role != DECODE or self._call.router_key is None:
            return []
        return [(KEY_HEADER, self._call.router_key), (TAKE_HEADER, msgspec.json.encode(self._done))]

    def _is_wanted(self, upstream: Upstream) -> bool:
        call = self._call
        if upstream.role != DECODE or call.router_key is None or call.method != "POST" or call.path not in PATHS:
            return False
        if call.owner is not None or call.path.endswith("/responses") and BACKGROUND in call.body:
            return False  # what it refers to is on one server
        num_parts = self._known.pop(upstream, None)
        num_known = PART_BYTES * (upstream.prefixes.count(call.facts.digests) if num_parts is None else num_parts)
        return call.facts.num_bytes - num_known >= MIN_BYTES

    async def _compute(self) -> None:
        """Try prefill servers, the best one first; with none, the decode server computes the prompt."""
        begin = time.monotonic()
        for server in self._rank_servers():
            work = self._pool.begin(server, self._call.facts)
            try:
                found = await self._ask(server)
            except UpstreamFailed as error:
                server.die(str(error))
                log.warning("%s: a prompt is computed elsewhere: %s", server.name, error)
                found = None
            finally:
                self._pool.end(server, self._call.facts, work)
            if found is not None:
                if found.num_tokens:
                    self._done = self._describe(server, found)
                    self._pool.handovers.count(time.monotonic() - begin)
                return
        self._pool.handovers.num_failed += 1

    def _rank_servers(self) -> list[Upstream]:
        """List the prefill servers by what they would have to do before this prompt is computed."""
        facts = self._call.facts
        found = [one for one in self._pool if one.role == PREFILL and one.takes_requests and one.serves(facts.model)]

        def cost(server: Upstream) -> tuple[int, int]:
            num_new = len(facts.digests) - server.prefixes.count(facts.digests)
            return server.work + PART_BYTES * num_new, server.number

        return sorted(found, key=cost)

    async def _ask(self, server: Upstream) -> ComputedPrompts | None:
        """Return what a server computed; None if another one should be asked."""
        call = self._call
        assert call.router_key is not None
        headers: Headers = [*call.headers, (KEY_HEADER, call.router_key), (PREFILL_HEADER, b"1")]
        response = await server.client.send(call.method, call.target, headers, [call.body])
        try:
            server.responses[response.status] += 1
            body = await response.read(MAX_ANSWER_BYTES)
        finally:
            response.close()
        if response.status == 200:
            try:
                return msgspec.json.decode(body, type=_Answer).handed_over
            except msgspec.DecodeError:
                raise UpstreamFailed("it answered a prompt that it was to hand over") from None
        if response.status in REFUSALS or response.status >= 500:
            return None
        return ComputedPrompts()  # a wrong request: the decode server says what is wrong

    def _describe(self, server: Upstream, found: ComputedPrompts) -> HandedOver:
        host = server.address.host
        host = f"[{host}]" if ":" in host else host
        source = "" if found.transfer_port is None else f"{host}:{found.transfer_port}"
        return HandedOver(server.name, found.num_tokens, round(found.seconds, 6), source)
