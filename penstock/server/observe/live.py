"""`GET /admin/live`: rates, rows, queues and the block pool, twice a second while someone looks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import Busy
from penstock.server.http import sse
from penstock.server.observe.rates import RateWindow

if TYPE_CHECKING:
    from penstock.engine.messages import Seen
    from penstock.server.catalog import Catalog
    from penstock.server.engines.engine import RemoteEngine
    from penstock.server.engines.in_flight import InFlightRequest
    from penstock.server.metrics import Metrics
    from penstock.server.model import ServedModel

MAX_WATCHERS = 16
MAX_ROWS = 512
PERIOD_S = 0.5
PATIENCE_S = 0.25  # for engines to answer; one within a long step is shown as it was
log = logging.getLogger("penstock.server")


class LiveHub:
    """One task looks for all watchers; without any there is none."""

    def __init__(self, catalog: Catalog, metrics: Metrics) -> None:
        self._catalog, self._metrics = catalog, metrics
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._rates: dict[str, RateWindow] = {}
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
        return {"time": time.time(), "models": [self._show(model) for model in self._catalog]}

    def _show(self, model: ServedModel) -> dict[str, Any]:
        engine = model.engine
        shown: dict[str, Any] = {"name": model.name, "state": "unloaded" if engine is None else engine.state}
        if engine is None:
            return {**shown, "restarts": 0, "rates": None, "rows": [], "num_rows": 0, "queue": [], "blocks": None}
        seen = engine.view.seen
        totals = {
            **{name: engine.total(name) for name in RateWindow.COUNTERS},
            **self._metrics.sum_latencies(model.name),
        }
        window = self._rates.setdefault(model.name, RateWindow())
        window.add(time.monotonic() if seen is None else engine.view.seen_s, totals)
        rows = _list_rows(engine, seen)
        return {
            **shown,
            "restarts": engine.num_restarts,
            "age_s": None if seen is None else round(time.monotonic() - engine.view.seen_s, 3),
            "rates": window.rates,
            "num_rows": len(rows),
            "rows": rows[:MAX_ROWS],
            "queue": [
                {"tenant": tenant.name, "requests": tenant.num_flights, "tokens": tenant.num_tokens}
                for tenant in engine.admission.tenants.values()
            ],
            "blocks": None if seen is None else _format_blocks(seen),
        }


def _replace(queue: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    with contextlib.suppress(asyncio.QueueEmpty):
        queue.get_nowait()
    queue.put_nowait(event)


def _list_rows(engine: RemoteEngine, seen: Seen | None) -> list[dict[str, Any]]:
    """List answers, those in the engine first."""
    dispatcher, rows = engine.dispatcher, []
    told: set[tuple[str, int]] = set()
    now = time.monotonic()
    for row in () if seen is None else seen.rows:
        part = dispatcher.parts.get(row.request_id)
        if part is None or row.sibling not in part.siblings:
            continue  # it has ended
        told.add((part.flight.request.id, row.sibling))
        more = {"state": row.state, "computed_tokens": row.computed, "cached_tokens": row.cached}
        rows.append(_format_row(part.flight, row.sibling, now, {**more, "preemptions": row.preemptions}))
    for flights in (dispatcher.flights.values(), engine.admission):
        for flight in flights:
            for sibling, tokens in flight.outputs.items():
                if len(rows) >= MAX_ROWS:
                    return rows
                if (flight.request.id, sibling) not in told:
                    told.add((flight.request.id, sibling))
                    state = "preempted" if tokens else "queued"
                    more = {"state": state, "computed_tokens": 0, "cached_tokens": flight.num_cached}
                    rows.append(
                        _format_row(flight, sibling, now, {**more, "preemptions": flight.trace.num_preemptions})
                    )
    return rows


def _format_row(flight: InFlightRequest, sibling: int, now_s: float, more: Mapping[str, Any]) -> dict[str, Any]:
    trace, request = flight.trace, flight.request
    return {
        "id": trace.answer_id or trace.id or request.id,
        "index": sibling,
        "tenant": flight.tenant,
        "state": more["state"],
        "prompt_tokens": len(request.tokens),
        "computed_tokens": more["computed_tokens"],
        "cached_tokens": more["cached_tokens"],
        "output_tokens": len(flight.outputs.get(sibling, ())),
        "max_tokens": request.max_tokens,
        "draft_tokens": trace.num_drafts,
        "accepted_tokens": trace.num_accepted,
        "preemptions": more["preemptions"],
        "age_s": round(now_s - flight.begun_s, 3),
    }


def _format_blocks(seen: Seen) -> dict[str, Any]:
    blocks = seen.blocks
    return {
        "num": blocks.num,
        "block_size": blocks.block_size,
        "free": blocks.free,
        "held": blocks.held,
        "cached": blocks.cached,
        "shared": blocks.shared,
        "evicted": blocks.evicted,
        "map": base64.b64encode(blocks.cells).decode(),
        "blocks_per_cell": blocks.blocks_per_cell,
    }
