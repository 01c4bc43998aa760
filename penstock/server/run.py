"""Start, watch and stop the server: its signals, certificates and processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import DEFAULT
from penstock.errors import InvalidConfig, PenstockError, quote
from penstock.host.files import MIB, UnreadableFile, read_regular
from penstock.host.interrupts import EXIT_BASE
from penstock.host.machine import hold_few_heaps, settle_collector
from penstock.server.catalog import Catalog, make_catalog
from penstock.server.config import ServerConfig
from penstock.server.connections.hosts import Hosts, read_origins
from penstock.server.connections.slots import raise_limit
from penstock.server.engines.process import WORKER, private_folder
from penstock.server.files.store import data_folder
from penstock.server.http.keys import KeyRing, make_ring, reload_keys
from penstock.server.metrics import Metrics
from penstock.server.pidfile import write_pidfile
from penstock.server.state import Server

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
RELOADING = signal.SIGHUP
MAX_PEM_BYTES = MIB
log = logging.getLogger("penstock.server")
BACKLOG = 2048  # connections waiting to be accepted
REPORT_S = 5.0
LOCAL = ("127.0.0.1", "::1", "localhost")


def record_signals() -> list[int]:
    """Record signals in the returned list until the event loop handles them. An exception raised here could be
    swallowed by a callback, or leave the import system's locks held. Nothing can be reloaded yet."""
    caught: list[int] = []
    for number in STOPPING:
        signal.signal(number, lambda number, frame: caught.append(number))
    signal.signal(RELOADING, signal.SIG_IGN)
    return caught


def ignore_signals() -> None:
    """Block signals during the final clean-up: a closing event loop restores handlers that kill the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, RELOADING))


def make_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """Make a TLS context; None for plain HTTP."""
    if certfile is None or keyfile is None:
        return None
    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        try:
            read_regular(path, MAX_PEM_BYTES)
        except UnreadableFile as error:
            raise InvalidConfig(f"cannot read {name}={path}: {error.reason}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=_refuse_password)
    except InvalidConfig:
        raise
    except (OSError, ValueError) as error:  # also ssl.SSLError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(
            f"cannot use ssl_certfile={certfile} with ssl_keyfile={keyfile} ({reason}): give a "
            "certificate and its own private key, both in PEM"
        ) from None
    return context


def _refuse_password() -> str:
    raise InvalidConfig(
        "ssl_keyfile is encrypted with a password: give a private key without one, as `openssl pkey` writes it"
    )


def serve(
    models: Mapping[str, str], options: Mapping[str, Any], config: ServerConfig, command: Sequence[str] = WORKER
) -> int:
    """Serve until stopped; return the exit status. `models` maps names to sources."""
    hold_few_heaps()
    raise_limit()
    context = make_context(config.ssl_certfile, config.ssl_keyfile)
    ring = make_ring(config)
    Hosts(config.host, config.allowed_hosts), read_origins(config.allowed_origins)  # fail before the engine starts
    caught = record_signals()
    with (
        listen(config.host, config.port) as listener,
        private_folder() as folder,
        data_folder(config.data_folder, config.port, folder) as data,
    ):
        if not ring.closed and config.host not in LOCAL:
            log.warning("listening on %s without --api-key: anyone who reaches this port can use it", config.host)
        catalog = make_catalog(models, options, config, ring, folder, command)
        with contextlib.suppress(ImportError):
            import uvloop

            uvloop.install()
        return asyncio.run(_Run(config, catalog, ring, listener, context, data).main(caught))


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
        self._data = data  # folder of files and batches
        self.metrics = Metrics()
        self.metrics.add_models(catalog)
        self.server = Server(config, catalog, self.metrics)
        self._num_signals = 0
        self._uvicorn: Any = None
        self._stop_task: asyncio.Task[None] | None = None

    async def main(self, caught: Sequence[int] = ()) -> int:
        """Serve until stopped; `caught` has the signals that came before the event loop's handlers."""
        loading = asyncio.ensure_future(self.catalog.start())
        await asyncio.sleep(0)  # start the engine process before the slow imports below
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, self._handle_signal)
        loop.add_signal_handler(RELOADING, self._reload)
        if caught:
            ignore_signals()
            return EXIT_BASE + caught[0]  # asyncio.run ends the tasks, and with them the engine
        self._uvicorn = self._make_uvicorn()
        serving = asyncio.ensure_future(self._uvicorn.serve([self.listener]))
        busy = asyncio.ensure_future(self._report_load())
        try:
            await asyncio.wait([loading, serving], return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and not self.server.is_draining:
                loading.result()
                settle_collector()
                self._log_banner()
                with write_pidfile(self.url, [model.name for model in self.catalog]):
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
        from penstock.server.connections.http_server import make_http_server

        return make_http_server(make_app(self.server, self.ring, self._data), self.context, self.server.access)

    def _handle_signal(self) -> None:
        """Stop after running requests on the first signal, at once on the second."""
        self._num_signals += 1
        if self._num_signals == 1:
            log.info(
                "stopping: running requests have %g s to finish; signal again to stop now", self.config.shutdown_timeout
            )
        elif self._stop_task is not None:
            self._stop_task.cancel()
        timeout_s = self.config.shutdown_timeout if self._num_signals == 1 else 0.0
        self._stop_task = asyncio.ensure_future(self._stop(timeout_s))

    def _reload(self) -> None:
        """Reload keys and certificates; those that are invalid are left as they are."""
        reloads: dict[str, Callable[[], None]] = {
            "keys": lambda: reload_keys(self.ring, self.config),
            "certificates": self._reload_certificates,
        }
        for name, reload in reloads.items():
            try:
                reload()
                log.info("reloaded %s", name)
            except (PenstockError, OSError, ValueError) as error:
                log.error("cannot reload %s, the old ones stay: %s", name, error)

    def _reload_certificates(self) -> None:
        self.context = make_context(self.config.ssl_certfile, self.config.ssl_keyfile)
        self._uvicorn.use_certificates(self.context)

    async def _stop(self, timeout_s: float) -> None:
        if not await self.server.drain(timeout_s):
            log.warning("some responses were cut short")
        self._uvicorn.should_exit = True

    def _log_banner(self) -> None:
        model = self.catalog.default
        facts = model.facts
        chosen = [(name, value, why) for name, value, why in facts.settings if why != DEFAULT]
        width = max(len(name) for name, _, _ in facts.settings)
        for name, value, why in [*chosen, *([] if facts.is_encoder else facts.defaults)]:
            log.info("  %-*s %-10s %s", width, name, value, why)
        log.info("  %d further settings have their defaults: /info lists them", len(facts.settings) - len(chosen))
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

    async def _report_load(self) -> None:
        """Log a line every few seconds in which something was computed."""
        before: dict[str, float] = {}
        while True:
            await asyncio.sleep(REPORT_S)
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
                        out / REPORT_S,
                        prompt / REPORT_S,
                        100 * cached / prompt if prompt else 0,
                        engine.stats.get("num_running", 0),
                        len(engine.admission),
                        100 * engine.stats.get("num_used_blocks", 0) / max(1, engine.stats.get("num_blocks", 1)),
                    )


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Listen on the configured address until the block ends."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(info[4])
            listener.listen(BACKLOG)  # at once: two sockets may bind to one port, but only one may listen
        except BaseException:
            listener.close()
            raise
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(
            f"cannot listen on {quote(host)} port {port}: {reason}; choose another with --host or --port"
        ) from None
    with listener:
        yield listener
