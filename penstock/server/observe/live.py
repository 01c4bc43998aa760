"""`GET /admin/live`: rates, rows, queues and the block pool, twice a second while someone looks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from penstock.errors import Busy
from penstock.server.http import sse
from penstock.server.observe.rates import RateWindow
from penstock.server.observe.snapshot import describe_absent, describe_model, summarize_trace

if TYPE_CHECKING:
    from penstock.server.catalog import Catalog
    from penstock.server.engines.fleet import Fleet
    from penstock.server.metrics import Metrics
    from penstock.server.model import ServedModel
    from penstock.server.observe.ring import TraceRing

MAX_WATCHERS = 16
MAX_ENDED = 20  # requests that ended, as shown
PERIOD_S = 0.5
PATIENCE_S = 0.25  # for engines to answer; one within a long step is shown as it was
log = logging.getLogger("penstock.server")


class LiveHub:
    """One task looks for all watchers; without any there is none."""

    def __init__(self, catalog: Catalog, metrics: Metrics, traces: TraceRing) -> None:
        self._catalog, self._metrics, self._traces = catalog, metrics, traces
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._rates: dict[str, tuple[Fleet, RateWindow]] = {}
        self._is_closed = False

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield an event per look until the server stops; Busy if too many watch."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise Busy(f"{len(self._watchers)} clients watch /admin/live, the limit is {MAX_WATCHERS}: close one", 5)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._watchers.add(queue)
        if self._looking is None and not self._is_closed:
            self._looking = asyncio.ensure_future(self._look_on())
        try:
            while not self._is_closed and (event := await queue.get()) is not None:
                yield event
        finally:
            self._watchers.discard(queue)
            if not self._watchers:
                self._stop()

    def close(self) -> None:
        """End all streams: the server stops."""
        self._is_closed = True
        for queue in self._watchers:
            _replace(queue, None)

    def _stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self._rates.clear()
        for model in self._catalog:
            if model.engine is not None:
                model.engine.view.close()

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begin_s = loop.time()
            try:
                event = sse.event(await self._look())
            except Exception:
                log.exception("cannot make the live view")
            else:
                for queue in self._watchers:
                    _replace(queue, event)  # a slow watcher misses looks
            await asyncio.sleep(max(0.0, begin_s + PERIOD_S - loop.time()))

    async def _look(self) -> dict[str, Any]:
        engines = [model.engine for model in self._catalog if model.engine is not None and model.engine.is_ready]
        await asyncio.gather(*(engine.view.look(PATIENCE_S) for engine in engines))
        return {
            "time": time.time(),
            "models": [self._show(model) for model in self._catalog],
            "ended": [summarize_trace(trace) for trace in self._traces.list_ended(MAX_ENDED)],
        }

    def _show(self, model: ServedModel) -> dict[str, Any]:
        engine = model.engine
        if engine is None:
            self._rates.pop(model.name, None)
            return {**describe_absent(model), "rates": None}
        known, window = self._rates.get(model.name, (None, None))
        if window is None or known is not engine:  # another engine counts from zero
            window = RateWindow()
            self._rates[model.name] = engine, window
        totals = {
            **{name: engine.total(name) for name in RateWindow.COUNTERS},
            **self._metrics.sum_latencies(model.name),
        }
        window.add(engine.view.seen_s if engine.view.list_seen() else time.monotonic(), totals)
        return {**describe_model(model, engine), "rates": window.rates}


def _replace(queue: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    with contextlib.suppress(asyncio.QueueEmpty):
        queue.get_nowait()
    queue.put_nowait(event)
