"""Starting, watching and stopping the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import InvalidConfig, PenstockError, shown
from penstock.machine import hold_few_heaps, settle_collector
from penstock.server.catalog import Catalog, make_catalog
from penstock.server.certificates import make_context
from penstock.server.config import ServerConfig
from penstock.server.descriptors import raise_limit
from penstock.server.files.folder import data_folder
from penstock.server.folder import private_folder
from penstock.server.hosts import make_hosts
from penstock.server.keys import KeyRing, make_ring
from penstock.server.metrics import Metrics
from penstock.server.origins import read_origins
from penstock.server.process import WORKER
from penstock.server.register import registered
from penstock.server.signals import RELOADING, STOPPING, ignore_signals, leave_on_signals
from penstock.server.state import Server

log = logging.getLogger("penstock.server")

BACKLOG = 2048  # connections that wait to be accepted
BUSY_LINE_S = 5.0
LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    models: Mapping[str, str], options: Mapping[str, Any], config: ServerConfig, command: Sequence[str] = WORKER
) -> int:
    """Serve until told to stop; the exit status. `models` are names and what each means."""
    hold_few_heaps()
    raise_limit()
    context = make_context(config.ssl_certfile, config.ssl_keyfile)
    ring = make_ring(config)
    make_hosts(config), read_origins(config.allowed_origins)  # refused now, not when the engine has started
    leave_on_signals()
    with (
        _listening(config) as listener,
        private_folder() as folder,
        data_folder(config.data_folder, config.port, folder) as data,
    ):
        if not ring.closed and config.host not in LOCAL:
            log.warning("listening on %s without --api-key: whoever reaches this port can use it", config.host)
        catalog = make_catalog(models, options, config, ring, folder, command)
        with contextlib.suppress(ImportError):
            import uvloop

            uvloop.install()
        return asyncio.run(_Run(config, catalog, ring, listener, context, data).main())


class _Run:
    def __init__(
        self,
        config: ServerConfig,
        catalog: Catalog,
        ring: KeyRing,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        data: Path,
    ) -> None:
        self.config, self.catalog, self.ring, self.listener, self.context = config, catalog, ring, listener, context
        self._data = data  # the folder of files and batches
        self.metrics = Metrics()
        self.metrics.watch(catalog)
        self.server = Server(config, catalog, self.metrics)
        self._num_signals = 0
        self._uvicorn: Any = None

    async def main(self) -> int:
        loading = asyncio.ensure_future(self.catalog.start())
        await asyncio.sleep(0)  # the engine's process starts before the slow imports below
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(RELOADING, self._reload)
        self._uvicorn = self._make_uvicorn()
        serving = asyncio.ensure_future(self._uvicorn.serve([self.listener]))
        busy = asyncio.ensure_future(self._report_while_busy())
        try:
            await asyncio.wait([loading, serving], return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and not self.server.draining:
                loading.result()
                settle_collector()
                self._banner()
                with registered(self.url, [model.name for model in self.catalog]):
                    await serving
            await serving
            return 0
        finally:
            busy.cancel()
            loading.cancel()
            self._uvicorn.should_exit = True
            await asyncio.gather(serving, busy, loading, return_exceptions=True)
            await self.server.close()
            ignore_signals()

    def _make_uvicorn(self) -> Any:
        from penstock.server.app import make_app
        from penstock.server.front import make_front

        return make_front(make_app(self.server, self.ring, self._data), self.context, self.server.access)

    def _signalled(self) -> None:
        """The first time answers are finished; the second time not."""
        self._num_signals += 1
        if self._num_signals == 1:
            log.info("stopping: answers have %g s to finish; once more stops now", self.config.shutdown_timeout)
            self._stopping = asyncio.ensure_future(self._stop(self.config.shutdown_timeout))
        else:
            self._stopping.cancel()
            self._stopping = asyncio.ensure_future(self._stop(0.0))

    def _reload(self) -> None:
        """Read keys and certificates again; what cannot be used stays as it was."""
        for name, reload in (("keys", self._reload_keys), ("certificates", self._reload_certificates)):
            try:
                reload()
                log.info("%s have been read again", name)
            except (PenstockError, OSError, ValueError) as error:
                log.error("%s stay as they were: %s", name, error)

    def _reload_keys(self) -> None:
        from penstock.server.keys import reload_keys

        reload_keys(self.ring, self.config)

    def _reload_certificates(self) -> None:
        self.context = make_context(self.config.ssl_certfile, self.config.ssl_keyfile)
        self._uvicorn.use_certificates(self.context)

    async def _stop(self, timeout_s: float) -> None:
        if not await self.server.drain(timeout_s):
            log.warning("some answers were cut off")
        self._uvicorn.should_exit = True

    def _banner(self) -> None:
        model = self.catalog.default
        facts = model.facts
        width = max(len(name) for name, _, _ in facts.settings)
        for name, value, why in [*facts.settings, *([] if facts.is_encoder else facts.defaults)]:
            log.info("  %-*s %-10s %s", width, name, value, why)
        log.info(
            "%s: %s %s, %.0f MB, loaded in %.1f s, cache for %d tokens",
            model.name,
            facts.architecture,
            facts.quantization,
            facts.num_bytes / 1e6,
            facts.load_s,
            facts.kv_cache_tokens,
        )
        log.info("listening on %s", self.url)

    @property
    def url(self) -> str:
        scheme = "https" if self.config.ssl_certfile else "http"
        host, port = self.listener.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _report_while_busy(self) -> None:
        """One line every few seconds in which something was computed."""
        before: dict[str, float] = {}
        while True:
            await asyncio.sleep(BUSY_LINE_S)
            for model in self.catalog:
                engine = model.engine
                if engine is None or not engine.stats:
                    continue
                names = ("num_output_tokens", "num_prompt_tokens", "num_cached_tokens", "num_steps")
                now = {f"{model.name}/{name}": engine.total(name) for name in names}
                out, prompt, cached, steps = (value - before.get(key, 0.0) for key, value in now.items())
                before |= now
                if steps > 0:
                    log.info(
                        "%s: %.1f tokens/s out, %.1f in (%.0f %% cached), %d running, %d waiting, cache %.0f %% used",
                        model.name,
                        out / BUSY_LINE_S,
                        prompt / BUSY_LINE_S,
                        100 * cached / prompt if prompt else 0,
                        engine.stats.get("num_running", 0),
                        len(engine.admission),
                        100 * engine.stats.get("num_used_blocks", 0) / max(1, engine.stats.get("num_blocks", 1)),
                    )


@contextlib.contextmanager
def _listening(config: ServerConfig) -> Iterator[socket.socket]:
    try:
        info = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(info[4])
            listener.listen(BACKLOG)  # at once: two sockets may be bound to one port, but only one may listen
        except BaseException:
            listener.close()
            raise
    except (OSError, ValueError) as error:  # ValueError: a host that is no name at all
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(
            f"cannot listen on {shown(config.host)} port {config.port}: {reason}; choose another with --host or --port"
        ) from None
    with listener:
        yield listener
