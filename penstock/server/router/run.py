"""Start and stop the router: its signals, certificates and heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from penstock.errors import PenstockError
from penstock.host.interrupts import EXIT_BASE
from penstock.server.connections.hosts import Hosts, read_origins
from penstock.server.connections.slots import raise_limit
from penstock.server.http.keys import make_ring, reload_keys
from penstock.server.router.config import RouterConfig
from penstock.server.router.state import RouterServer
from penstock.server.run import LOCAL, RELOADING, STOPPING, ignore_signals, listen, make_context, record_signals

log = logging.getLogger("penstock.router")


def route(urls: Sequence[str], config: RouterConfig) -> int:
    """Route until stopped; return the exit status."""
    raise_limit()
    context = make_context(config.ssl_certfile, config.ssl_keyfile)
    ring = make_ring(config)
    Hosts(config.host, config.allowed_hosts), read_origins(config.allowed_origins)
    router = RouterServer(config, urls, ring)
    caught = record_signals()
    with listen(config.host, config.port) as listener:
        if not ring.closed and config.host not in LOCAL:
            log.warning("listening on %s without --api-key: the servers' own keys decide who is served", config.host)
        with contextlib.suppress(ImportError):
            import uvloop

            uvloop.install()
        return asyncio.run(_RouterRun(router, listener, context).main(caught))


class _RouterRun:
    def __init__(self, router: RouterServer, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        self.router, self.listener, self.context = router, listener, context
        self._num_signals = 0
        self._uvicorn: Any = None
        self._stop_task: asyncio.Task[None] | None = None

    async def main(self, caught: Sequence[int] = ()) -> int:
        from penstock.server.connections.http_server import make_http_server
        from penstock.server.router.app import make_app

        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, self._handle_signal)
        loop.add_signal_handler(RELOADING, self._reload)
        if caught:
            ignore_signals()
            return EXIT_BASE + caught[0]
        self._uvicorn = make_http_server(make_app(self.router), self.context, self.router.access)
        self.router.start()
        log.info("listening on %s, for %s", self.url, ", ".join(one.name for one in self.router.pool))
        try:
            await self._uvicorn.serve([self.listener])
            return 0
        finally:
            await self.router.close()
            ignore_signals()

    @property
    def url(self) -> str:
        scheme = "https" if self.context is not None else "http"
        host, port = self.listener.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def _handle_signal(self) -> None:
        """Stop after running requests on the first signal, at once on the second."""
        self._num_signals += 1
        timeout_s = self.router.config.shutdown_timeout if self._num_signals == 1 else 0.0
        log.info("stopping: running requests have %g s to finish", timeout_s)
        if self._stop_task is not None:
            self._stop_task.cancel()
        self._stop_task = asyncio.ensure_future(self._stop(timeout_s))

    async def _stop(self, timeout_s: float) -> None:
        if not await self.router.drain(timeout_s):
            log.warning("some responses were cut short")
        self._uvicorn.should_exit = True

    def _reload(self) -> None:
        """Reload keys and certificates; those that are invalid are left as they are."""
        try:
            reload_keys(self.router.ring, self.router.config)
            self.context = make_context(self.router.config.ssl_certfile, self.router.config.ssl_keyfile)
            self._uvicorn.use_certificates(self.context)
            log.info("reloaded keys and certificates")
        except (PenstockError, OSError, ValueError) as error:
            log.error("cannot reload, the old ones stay: %s", error)
