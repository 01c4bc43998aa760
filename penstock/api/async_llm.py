"""The asyncio interface: requests from any task, one engine thread, deltas as they are generated."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.api.assemble import assemble
from penstock.api.prompts import AnyLora
from penstock.api.service import Service
from penstock.api.vllm.porting import check_task, port_options
from penstock.config import EngineConfig
from penstock.errors import PenstockError
from penstock.text.answers import Collector
from penstock.text.prompt_encoder import Encoded, Messages, Prompt
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import LoRARequest, SamplingParams, StreamDelta

PREPARING_S = 0.005  # between the engine's preparations, while idle
Made = TypeVar("Made")
CLOSED = "this AsyncLLM is closed: make a new one"


class AsyncStream:
    """Carries one request's deltas from the engine thread to a task. Made by the task, pushed to by the thread."""

    def __init__(self) -> None:
        self.collector: Collector | None = None
        self.held: object = None
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[StreamDelta | PenstockError] = asyncio.Queue()

    def push(self, item: StreamDelta | PenstockError) -> bool:
        """Queue an item; False if the event loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            return False
        return True

    async def next(self) -> StreamDelta:
        item = await self._items.get()
        if isinstance(item, PenstockError):
            raise item
        return item


class _Loop(threading.Thread):
    """Runs the service. Other threads queue calls, which it makes between steps.

    Every stream is in `_streams` from before its call is queued until it ends, so whatever ends the thread also ends
    it.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(name="penstock-engine", daemon=True)
        self._service = service
        self._is_prepared = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next two
        self._streams: set[AsyncStream] = set()
        self._asked: set[Future[Any]] = set()  # of `call`, not answered yet
        self._ended: str | None = None  # the reason, once no more steps will run

    def open(
        self, stream: AsyncStream, encoded: Encoded, params: SamplingParams | None, priority: int, lora: AnyLora
    ) -> None:
        with self._lock:
            if self._ended:
                raise PenstockError(self._ended)
            self._streams.add(stream)
        self._calls.put(lambda: self._submit(stream, encoded, params, priority, lora))

    def abort(self, stream: AsyncStream) -> None:
        """Abort a stream; its blocks are free once the present step ends."""
        self._calls.put(lambda: self._drop(stream))

    def call(self, work: Callable[[Service], Made]) -> Future[Made]:
        """Run work between two steps."""
        future: Future[Made] = Future()

        def run() -> None:
            try:
                future.set_result(work(self._service))
            except Exception as error:  # for who asked, not for the others
                future.set_exception(error)

        with self._lock:
            if self._ended:
                raise PenstockError(self._ended)
            self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        self._calls.put(run)
        return future

    def end(self) -> None:
        """Start no further step; open streams get an error."""
        self._calls.put(None)
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        reason, cause = CLOSED, None
        try:
            while self._make_calls():
                self._service.step()
        except BaseException as error:
            reason, cause = f"the engine failed ({type(error).__name__}: {error}): make a new AsyncLLM", error
        with self._lock:
            self._ended, streams = reason, list(self._streams)
            self._streams.clear()
        for future in list(self._asked):
            future.set_exception(PenstockError(reason))
        for stream in streams:
            failure = PenstockError(reason)
            failure.__cause__ = cause
            stream.push(failure)
        self._service.close()

    def _make_calls(self) -> bool:
        """Make the queued calls; with nothing to compute, wait for one. False ends the thread."""
        engine = self._service.engine
        while not self._calls.empty() or not engine.has_work:
            if self._calls.empty() and engine.has_saves:
                engine.save()
                continue
            try:
                call = self._calls.get(timeout=None if self._is_prepared else PREPARING_S)
            except queue.Empty:
                self._is_prepared = not engine.prepare()
                continue
            if call is None:
                return False
            call()
        return True

    def _submit(
        self, stream: AsyncStream, encoded: Encoded, params: SamplingParams | None, priority: int, lora: AnyLora
    ) -> None:
        if stream not in self._streams:
            return
        try:
            collector = self._service.submit(encoded, params, priority=priority, lora=lora)
        except Exception as error:  # one bad request must not end the others
            stream.push(
                error
                if isinstance(error, PenstockError)
                else PenstockError(f"the request cannot be queued ({type(error).__name__}: {error})")
            )
            self._drop(stream)
            return
        stream.collector = collector
        collector.listener = lambda item: self._deliver(stream, collector, item)

    def _deliver(self, stream: AsyncStream, collector: Collector, item: StreamDelta) -> None:
        failed = PenstockError(f"the model failed on this request: {collector.error}") if collector.error else None
        if collector.finished:
            self._drop(stream)
        if not stream.push(failed or item):
            self.abort(stream)

    def _drop(self, stream: AsyncStream) -> None:
        with self._lock:
            self._streams.discard(stream)
        if stream.collector is not None and not stream.collector.finished:
            self._service.abort(stream.collector)


class AsyncLLM:
    """A model that serves many tasks at once. `options` are those of LLM."""

    def __init__(self, model: str, *, progress: bool = False, draft_fn: Any = None, **options: Any) -> None:
        config = EngineConfig.from_options(**port_options(options))
        service = Service(assemble(str(model), config, show_progress=progress, draft_fn=draft_fn))
        try:
            check_task(options, service.assembly.spec.is_encoder, str(model))
        except PenstockError:
            service.close()
            raise
        service.loras.is_lazy = True
        self._service = service
        self._thread = _Loop(service)
        self._thread.start()
        self._end = weakref.finalize(self, self._thread.end)  # on collection, and before the interpreter exits

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._service.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of a request that sets none; `penstock info` says where they come from."""
        return self._service.default_params.clone()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: AnyLora = None,
    ) -> AsyncGenerator[StreamDelta, None]:
        """Yield the answers' deltas. Leaving the loop early, or cancellation, aborts the request."""
        return self._stream(
            lambda cut: self._service.intake.encode(prompt, cut=cut), sampling_params, priority, lora=lora_request
        )

    def follow(
        self,
        stream: AsyncStream,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        priority: int,
        lora_request: AnyLora = None,
    ) -> AsyncGenerator[StreamDelta, None]:
        """Like `generate`, over the caller's own stream, which can be aborted."""
        return self._stream(
            lambda cut: self._service.intake.encode(prompt, cut=cut), sampling_params, priority, stream, lora_request
        )

    def abort(self, stream: AsyncStream) -> None:
        """End a request; the reader of its deltas gets a last one with finish_reason="abort"."""
        self._thread.abort(stream)
        stream.push(StreamDelta("", 0, "", (), finish_reason="abort"))

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: AnyLora = None,
    ) -> AsyncGenerator[StreamDelta, None]:
        """Like `generate`, for a conversation."""
        return self._stream(
            lambda cut: self._service.intake.encode_messages(messages, cut=cut),
            sampling_params,
            priority,
            lora=lora_request,
        )

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Name an adapter before its first request. Its files are read when that runs."""
        return await asyncio.wrap_future(self._thread.call(lambda service: service.loras.add(lora_request)))

    async def remove_lora(self, lora: LoRARequest | int) -> bool:
        """Free an adapter that no request uses, by its id; False if there is none."""
        return await asyncio.wrap_future(self._thread.call(lambda service: service.loras.remove(lora)))

    async def list_loras(self) -> set[int]:
        return await asyncio.wrap_future(self._thread.call(lambda service: service.loras.list_ids()))

    async def _stream(
        self,
        encode: Callable[[bool], Encoded],
        params: SamplingParams | None,
        priority: int,
        stream: AsyncStream | None = None,
        lora: AnyLora = None,
    ) -> AsyncGenerator[StreamDelta, None]:
        params = self._service.streamable(params)
        encoded = encode(params is not None and params.truncate_prompt_tokens is not None)
        stream = stream or AsyncStream()
        if params is not None and (params.structured_outputs is not None or params.has_dry):
            # Compiled here, so that the engine thread finds it done.
            stream.held = await asyncio.to_thread(self._service.intake.prepare, params, len(encoded.tokens))
        self._thread.open(stream, encoded, params, priority, lora)
        num_open = (params or self._service.default_params).n
        try:
            while num_open:
                item = await stream.next()
                num_open = 0 if item.finish_reason == "abort" else num_open - (item.finish_reason is not None)
                yield item
        finally:
            if num_open:
                self._thread.abort(stream)

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, and what runs now."""
        return self._service.stats()

    def close(self) -> None:
        """End the engine thread and free everything; open streams get an error. Idempotent."""
        self._end()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
