"""An upstream server: its health by heartbeat, its load, and the prompts it was sent lately."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.server.config import BOTH, ROLES
from penstock.server.engines.prefixes import BLOCK_TOKENS, MIN_KNOWN_TOKENS, SentPrefixes
from penstock.server.http.relay import FACTS_HEADER, KEY_HEADER, ServerFacts
from penstock.server.router.http_client import Address, Headers, UpstreamClient, UpstreamFailed

log = logging.getLogger("penstock.router")
MAX_KNOWN_PARTS = 1 << 16  # of prompts, per server: a few MB
MAX_PROBE_BYTES = 4 << 20
MODELS_EVERY = 10  # heartbeats


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


class _Health(msgspec.Struct):
    role: str = BOTH


class Upstream:
    """One server. `is_ready` follows the heartbeat."""

    def __init__(
        self,
        number: int,
        address: Address,
        context: ssl.SSLContext | None,
        headers: Headers,
        router_key: str | None = None,
        max_rows: int | None = None,
    ) -> None:
        """`max_rows`: requests at once, if the server does not tell."""
        self.number, self.address = number, address
        self.client = UpstreamClient(address, context)
        self.prefixes = SentPrefixes(MAX_KNOWN_PARTS)
        self.models: frozenset[str] | None = None  # None: it does not tell
        self.role = BOTH
        self.state = "not asked yet"
        self.is_ready = self.is_drained = False
        self.work = 0  # bytes of prompts and answers under way, as estimated
        self.num_running = self.num_rows = 0
        self.facts: ServerFacts | None = None  # as it told last
        self.num_deaths = 0
        self.responses: Counter[int] = Counter()  # by status
        self.on_beat: Callable[[], None] = lambda: None
        self._headers, self._max_rows = headers, max_rows
        self._key: Headers = [] if router_key is None else [(KEY_HEADER, router_key.encode())]
        self._has_health = True
        self._is_closed = False
        self._num_beats = 0

    @property
    def name(self) -> str:
        return self.address.url

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.is_drained

    @property
    def max_rows(self) -> int | None:
        """Requests that it runs at once; None if that is not known."""
        told = None if self.facts is None else self.facts.rows
        return self._max_rows if told is None else told

    @property
    def has_room(self) -> bool:
        return self.max_rows is None or self.num_rows < self.max_rows

    def serves(self, model: str | None) -> bool:
        return model is None or self.models is None or model in self.models

    def refuse(self, why: str) -> None:
        """Send nothing new until a heartbeat says that it is ready."""
        self._set_state(False, why)

    def die(self, why: str) -> None:
        """Count a response that broke off, or a request that was not answered."""
        self.num_deaths += 1
        self._set_state(False, why)

    async def watch(self, every_s: float, hang_s: float) -> None:
        """Check its health until it is closed."""
        while not self._is_closed:
            await self.check(hang_s)
            self.on_beat()
            await asyncio.sleep(every_s)

    async def check(self, hang_s: float) -> None:
        """Check its health once."""
        try:
            status, body, told = await asyncio.wait_for(
                self._ask("/health/ready" if self._has_health else "/v1/models"), hang_s
            )
            if status in (404, 405) and self._has_health:
                self._has_health = False
                return await self.check(hang_s)
        except asyncio.TimeoutError:
            self._set_state(False, f"no answer to a health check in {hang_s:g} s")
            self.client.break_all()
            return
        except UpstreamFailed as error:
            self._set_state(False, str(error))
            return
        if status != 200:
            self._has_health = True  # what stands before it may have said 404
            return self._set_state(False, f"its health check says {status}")
        if self._has_health:
            self._read_role(body)
        self._take_facts(told)
        if not self._has_health:
            self._read_models(body)
        elif self._num_beats % MODELS_EVERY == 0 or not self.is_ready:
            with contextlib.suppress(UpstreamFailed, asyncio.TimeoutError):
                listed, body, _ = await asyncio.wait_for(self._ask("/v1/models"), hang_s)
                if listed == 200:
                    self._read_models(body)
        self._num_beats += 1
        self._set_state(True, "ready")

    def close(self) -> None:
        """End `watch`; before Python 3.12 a cancelled wait may go on."""
        self._is_closed = True
        self.client.break_all()

    def forget_models(self) -> None:
        """Have the next heartbeat ask for them."""
        self._num_beats = 0

    def _take_facts(self, told: bytes) -> None:
        """Forget what it was sent, once its cache is another: by its name, or where it tells none, after a loss."""
        facts: ServerFacts | None = None
        with contextlib.suppress(msgspec.DecodeError):
            facts = msgspec.json.decode(told, type=ServerFacts) if told else None
        is_other = not self.is_ready if facts is None else self.facts is None or facts.cache != self.facts.cache
        self.facts = facts
        num_tokens = None if facts is None else facts.cache_tokens
        max_parts = MAX_KNOWN_PARTS
        if num_tokens is not None:
            max_parts = min(MAX_KNOWN_PARTS, max(num_tokens, MIN_KNOWN_TOKENS) // BLOCK_TOKENS)
        if is_other or max_parts != self.prefixes.max_blocks:
            self.prefixes.reset(max_parts)

    async def _ask(self, path: str) -> tuple[int, bytes, bytes]:
        """Return the status, the body and what the server tells a router."""
        health = path.startswith("/health")
        response = await self.client.send("GET", path.encode(), [*self._headers, *(self._key if health else ())])
        try:
            return response.status, await response.read(MAX_PROBE_BYTES), response.find(FACTS_HEADER.encode())
        finally:
            response.close()

    def _read_models(self, body: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            self.models = frozenset(card.id for card in msgspec.json.decode(body, type=_Models).data)

    def _read_role(self, body: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            role = msgspec.json.decode(body, type=_Health).role
            self.role = role if role in ROLES else BOTH

    def _set_state(self, is_ready: bool, state: str) -> None:
        if is_ready != self.is_ready:
            (log.info if is_ready else log.warning)("%s: %s", self.name, state)
            if is_ready:
                self.client.close()  # connections of before
        self.is_ready, self.state = is_ready, state
