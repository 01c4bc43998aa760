"""The streaming interface for asyncio: requests from any task, one engine thread, deltas as they are made."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from penstock.answers import Collector
from penstock.assemble import assemble
from penstock.config import EngineConfig
from penstock.errors import PenstockError
from penstock.intake import Messages, Prompt
from penstock.service import Service
from penstock.text.tokenizer import Tokenizer
from penstock.types import SamplingParams, StreamDelta

Item = StreamDelta | PenstockError | BaseException
Deliver = Callable[[Item], None]


class _Loop(threading.Thread):
    """Runs the service. Other threads hand it calls; between steps it makes them."""

    def __init__(self, service: Service) -> None:
        super().__init__(name="penstock-engine", daemon=True)
        self.service = service
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._subscribers: dict[str, Deliver] = {}

    def call(self, function: Callable[[], None] | None) -> None:
        """Make a call on the engine thread; None ends it."""
        self._calls.put(function)

    def subscribe(self, collector: Collector, deliver: Deliver) -> None:
        self._subscribers[collector.request.id] = deliver

    def abort(self, collector: Collector) -> None:
        self._subscribers.pop(collector.request.id, None)
        self.service.abort(collector)

    def run(self) -> None:
        while self._make_calls():
            try:
                self._step()
            except BaseException as error:
                for deliver in self._subscribers.values():
                    deliver(error)
                self._subscribers.clear()
                self.service.collectors.clear()
                raise

    def _make_calls(self) -> bool:
        """Make the calls that wait; with nothing to compute, wait for one. False ends the thread."""
        while not self._calls.empty() or not self.service.engine.has_work:
            call = self._calls.get()
            if call is None:
                return False
            call()
        return True

    def _step(self) -> None:
        for collector, item in self.service.step():
            deliver = self._subscribers.get(collector.request.id)
            if deliver is None:
                continue
            deliver(PenstockError(f"the model failed on this request: {collector.error}") if collector.error else item)
            if collector.finished:
                del self._subscribers[collector.request.id]


class AsyncLLM:
    """A model that serves many tasks at once. `options` are the fields of EngineConfig."""

    def __init__(self, model: str, *, progress: bool = False, **options: Any) -> None:
        service = Service(assemble(str(model), EngineConfig.from_options(**options), show_progress=progress))
        self._service = service
        self._thread: _Loop | None = _Loop(service)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._service.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        return self._service.default_params

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0,
                       ) -> AsyncIterator[StreamDelta]:
        """Yield the answers' deltas. Leaving the loop early, or being cancelled, aborts the request."""
        text, tokens = self._service.intake.encode(prompt)
        async for item in self._stream(tokens, sampling_params, text, priority):
            yield item

    async def chat(self, messages: Messages, sampling_params: SamplingParams | None = None, *, priority: int = 0,
                   ) -> AsyncIterator[StreamDelta]:
        """As `generate`, for a conversation."""
        tokens = self._service.intake.encode_messages(messages)
        async for item in self._stream(tokens, sampling_params, None, priority):
            yield item

    async def _stream(self, tokens: Sequence[int], params: SamplingParams | None, text: str | None, priority: int,
                      ) -> AsyncIterator[StreamDelta]:
        thread = self._running()
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()
        collectors: list[Collector] = []

        def deliver(item: Item) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        def submit() -> None:
            try:
                collector = self._service.submit(tokens, params or self._service.default_params, prompt=text,
                                                 priority=priority)
            except PenstockError as error:
                deliver(error)
                return
            collectors.append(collector)
            thread.subscribe(collector, deliver)

        def abort() -> None:
            for collector in collectors:
                thread.abort(collector)

        thread.call(submit)
        num_open = (params or self._service.default_params).num_siblings
        try:
            while num_open:
                item = await items.get()
                if isinstance(item, BaseException):
                    raise item
                num_open -= item.finish_reason is not None
                yield item
        finally:
            if num_open:
                thread.call(abort)

    def stats(self) -> dict[str, Any]:
        return self._service.stats()

    def _running(self) -> _Loop:
        if self._thread is None or not self._thread.is_alive():
            raise PenstockError("this AsyncLLM is closed: make a new one")
        return self._thread

    def close(self) -> None:
        """End the engine thread and free everything; open streams get an error."""
        thread, self._thread = getattr(self, "_thread", None), None
        if thread is not None:
            thread.call(None)
            thread.join()
            for deliver in thread._subscribers.values():
                deliver(PenstockError("this AsyncLLM was closed while the request ran"))
            self._service.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
