"""The engines of one model: replicas behind one admission queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from penstock.engine.messages import Answer, DropLora, Found, LoadLora, Ready, Seen
from penstock.errors import EngineFailed, PenstockError
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.dispatcher import Dispatcher
from penstock.server.engines.engine import RemoteEngine
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.process import Launch


class FleetView:
    """All engines as they were last looked at."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self._engines = engines

    @property
    def seen_s(self) -> float:
        return min(engine.view.seen_s for engine in self._engines if engine.view.seen is not None)

    def list_seen(self) -> list[tuple[RemoteEngine, Seen]]:
        return [(engine, engine.view.seen) for engine in self._engines if engine.view.seen is not None]

    async def look(self, patience_s: float) -> None:
        await asyncio.gather(*(engine.view.look(patience_s) for engine in self._engines if engine.is_ready))

    def close(self) -> None:
        for engine in self._engines:
            engine.view.close()


class Fleet:
    """Engines that are started, watched and restarted each on its own; a request runs on any of them."""

    def __init__(
        self,
        name: str,
        launch: Launch,
        admission: AdmissionQueue,
        *,
        hang_s: float = 60.0,
        on_found: Callable[[Found], None] = lambda found: None,
    ) -> None:
        """Make `launch.num_replicas` engines."""
        self.name, self.options, self.admission = name, launch.options, admission
        self.dispatcher = Dispatcher(admission)
        names = [f"{name}, replica {number}" for number in range(launch.num_replicas)]
        self.engines = [
            RemoteEngine(one, launch, self.dispatcher, hang_s=hang_s, on_found=on_found)
            for one in (names if len(names) > 1 else [name])
        ]
        self.num_forgotten = 0  # times that the caches were emptied
        self.view = FleetView(self.engines)

    def list_first(self, list_messages: Callable[[], Iterable[object]]) -> None:
        """Set the messages that every engine gets before its first request."""
        for engine in self.engines:
            engine.list_first = list_messages

    @property
    def num_ready(self) -> int:
        return sum(engine.is_ready for engine in self.engines)

    @property
    def is_ready(self) -> bool:
        """True if any engine is: requests of the others continue on it."""
        return self.num_ready > 0

    @property
    def state(self) -> str:
        """A line of text for health checks."""
        down = [engine.state for engine in self.engines if not engine.is_ready]
        if len(self.engines) == 1 or not down:
            return self.engines[0].state
        return f"{self.num_ready} of {len(self.engines)} replicas ready; {down[0]}"

    @property
    def retry_after_s(self) -> int:
        return min(engine.retry_after_s for engine in self.engines)

    @property
    def is_busy(self) -> bool:
        return bool(self.dispatcher.flights or len(self.admission))

    @property
    def failure(self) -> str | None:
        """The reason why the engines were given up."""
        return next((engine.failure for engine in self.engines if engine.failure is not None), None)

    @property
    def facts(self) -> Ready | None:
        """Facts of the engine with the smallest cache; None until all are loaded."""
        facts = [engine.facts for engine in self.engines]
        known = [one for one in facts if one is not None]
        return min(known, key=lambda one: one.kv_cache_tokens) if len(known) == len(facts) else None

    @property
    def stats(self) -> dict[str, float]:
        counts: Counter[str] = Counter()
        for engine in self.engines:
            counts.update(engine.stats)
        return dict(counts)

    @property
    def num_restarts(self) -> int:
        return sum(engine.num_restarts for engine in self.engines)

    @property
    def pid(self) -> int | None:
        """The process of the first engine."""
        return self.engines[0].pid

    def total(self, name: str) -> float:
        """Sum a counter over all engines and their processes so far."""
        return sum(engine.total(name) for engine in self.engines)

    async def wait_ready(self) -> Ready:
        """Wait until the model is loaded everywhere; return its facts."""
        await asyncio.gather(*(engine.wait_ready() for engine in self.engines))
        facts = self.facts
        assert facts is not None
        return facts

    async def run(self) -> None:
        """Run all engines until they are closed, or one cannot load the model."""
        running = [asyncio.ensure_future(engine.run()) for engine in self.engines]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            await self.close()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    def submit(self, *flights: InFlightRequest) -> None:
        """Queue the prompts of one client request, all or none; Busy if the queue is full."""
        if self.failure is not None:
            raise EngineFailed(self.failure)
        self.dispatcher.submit(*flights)

    def abort(self, *flights: InFlightRequest) -> None:
        """Abort requests whose clients are gone; their blocks are free within one step."""
        self.dispatcher.abort(*flights)

    def forget_prefixes(self) -> None:
        self.num_forgotten += 1
        for engine in self.engines:
            engine.forget_prefixes()

    async def ask(self, message: object) -> Answer:
        """Tell all engines; return the first error, else the first answer. An adapter that one engine cannot load is
        dropped by the others. An engine that restarts is waited for."""
        asked = [engine.controls.ask(message) for engine in self.engines]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        failed = [one for one in answers if isinstance(one, BaseException) or one.error is not None]
        if failed and isinstance(message, LoadLora) and len(failed) < len(answers):
            drops = (engine.controls.ask(DropLora(message.number)) for engine in self.engines)
            await asyncio.gather(*drops, return_exceptions=True)
        first = failed[0] if failed else answers[0]
        if isinstance(first, BaseException):
            raise first if isinstance(first, PenstockError) else EngineFailed(str(first)) from first
        return first

    async def close(self) -> None:
        """Stop the processes; requests in flight fail."""
        await asyncio.gather(*(engine.close() for engine in self.engines))


def sum_totals(engine: Fleet | RemoteEngine, prefix: str) -> dict[str, float]:
    """Sum all counters whose names begin with `prefix`, by the rest of the name."""
    engines = engine.engines if isinstance(engine, Fleet) else [engine]
    names = sorted({name for one in engines for name in one.list_totals() if name.startswith(prefix)})
    return {name.removeprefix(prefix): engine.total(name) for name in names}
