"""The router as a whole: its servers, its keys and its running requests."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence

from penstock.errors import InvalidConfig
from penstock.server.http.access import AccessLog
from penstock.server.http.keys import KeyRing, read_secret
from penstock.server.router.admission import FleetQueue
from penstock.server.router.config import RouterConfig
from penstock.server.router.http_client import Address, Headers
from penstock.server.router.metrics import RouterMetrics
from penstock.server.router.pool import UpstreamPool
from penstock.server.router.upstream import Upstream

POLL_S = 0.05
MAX_KEPT_BYTES = 512 << 20  # of bodies that may have to be sent again


class RouterServer:
    def __init__(self, config: RouterConfig, urls: Sequence[str], ring: KeyRing) -> None:
        self.config, self.ring = config, ring
        self.router_key = read_secret(config.router_key_file, "router_key_file")
        self.upstream_key = read_secret(config.upstream_api_key_file, "upstream_api_key_file")
        context = _make_context(config.upstream_ca_file)
        addresses = [Address.parse(url) for url in urls]
        if len({one.authority + one.prefix.encode() for one in addresses}) < len(addresses):
            raise InvalidConfig("a server is given twice: name each URL once")
        headers = self.list_key_headers()
        self.pool = UpstreamPool(
            [
                Upstream(number, one, context, headers, self.router_key, config.max_upstream_requests)
                for number, one in enumerate(addresses)
            ],
            config.policy,
        )
        self.queue = FleetQueue(config.max_queued_requests, ring.weights())
        for one in self.pool:
            one.on_beat = self.queue.dispatch
        self.metrics = RouterMetrics(self.pool, self.queue)
        self.access = AccessLog(self.metrics, config.access_log)
        self.is_draining = False
        self.begun_s = time.time()
        self.num_running = 0
        self.num_kept_bytes = 0
        self._watching: list[asyncio.Task[None]] = []

    def list_key_headers(self) -> Headers:
        """List what servers know the router by, where it has a key of its own for them."""
        return [] if self.upstream_key is None else [(b"authorization", b"Bearer " + self.upstream_key.encode())]

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and self.pool.is_ready

    def start(self) -> None:
        config = self.config
        self._watching = [
            asyncio.ensure_future(one.watch(config.heartbeat_s, config.hang_timeout)) for one in self.pool
        ]

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; True if all ended."""
        self.is_draining = True
        end = time.monotonic() + timeout_s
        while self.num_running and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        return not self.num_running

    async def close(self) -> None:
        for one in self.pool:
            one.close()
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)


def _make_context(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"cannot use upstream_ca_file={ca_file}: {error}; give certificates in PEM") from None
