"""Running requests for a client: all the siblings of all the prompts, until the end or until the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import DeadlinePassed, PenstockError
from penstock.server.flight import Flight
from penstock.server.logprobs import num_prompt_logprobs
from penstock.server.model import ServedModel
from penstock.types import SamplingParams, StreamDelta

if TYPE_CHECKING:
    from penstock.server.state import Server


@dataclass
class Usage:
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0

    def add(self, item: StreamDelta) -> None:
        self.num_output += len(item.token_ids)

    def openai(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


@dataclass
class Times:
    """When things happened to a client's request, by time.monotonic()."""

    begun_s: float
    first_s: float | None = None
    end_s: float | None = None

    def timings(self, usage: Usage) -> dict[str, float]:
        """As llama.cpp's server tells them."""
        end = self.end_s or time.monotonic()
        first = self.first_s or end
        prompt_ms, predicted_ms = 1e3 * (first - self.begun_s), 1e3 * (end - first)
        computed, produced = usage.num_prompt - usage.num_cached, usage.num_output
        return {
            "cache_n": usage.num_cached,
            "prompt_n": computed,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, computed),
            "prompt_per_second": 1e3 * computed / max(prompt_ms, 1e-3),
            "predicted_n": produced,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(1, produced),
            "predicted_per_second": 1e3 * produced / max(predicted_ms, 1e-3),
        }


class Generation:
    """Several flights as one stream of (prompt number, items). Leaving it early aborts what still runs."""

    flights: Sequence[Flight] = ()

    def __init__(self, model: ServedModel, flights: Sequence[Flight], server: Server) -> None:
        self.model = model
        self._server = server
        self.flights = list(flights)
        self.usage = Usage(num_prompt=sum(len(flight.request.tokens) for flight in flights))
        self.times = Times(min(flight.begun_s for flight in flights))
        server.generations.add(self)

    @property
    def relaxed(self) -> dict[str, list[str]]:
        """A field of the answer that says what of a schema was not enforced; none where all of it was."""
        named = dict.fromkeys(
            one
            for flight in self.flights
            if flight.request.grammar is not None
            for one in flight.request.grammar.relaxed
        )
        return {"relaxed": list(named)} if named else {}

    @property
    def num_logprobs(self) -> int:
        """Log probabilities in the whole answer, at most; those of a prompt once for each of its answers."""
        requests = [flight.request for flight in self.flights]
        most = max(
            (request.sampling.logprobs + 1 for request in requests if request.sampling.logprobs is not None), default=0
        )
        return most * self.usage.num_output + sum(
            num_prompt_logprobs(request.sampling, len(request.tokens)) for request in requests
        )

    def num_in(self, batch: Sequence[StreamDelta], num_first: int = 0) -> int:
        """Log probabilities in the events of a batch, `num_first` of which show the prompt's."""
        sampling = self.flights[0].request.sampling if self.flights else SamplingParams()
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            return 0
        num_prompt = num_first * num_prompt_logprobs(sampling, batch[0].num_prompt_tokens) // sampling.n
        return num_prompt + sum(len(item.logprobs) for item in batch) * ((sampling.logprobs or 0) + 1)

    async def stream(self) -> AsyncGenerator[tuple[int, list[StreamDelta]], None]:
        metrics, name, last = self._server.metrics, self.model.name, 0.0
        try:
            async with contextlib.aclosing(self._merged()) as items:
                async for index, batch in items:
                    now = time.monotonic()
                    if self.times.first_s is None:
                        self.times.first_s = now
                        self.usage.num_cached = sum(flight.num_cached for flight in self.flights)
                    else:
                        metrics.gap(name, now - last)
                    last = now
                    for item in batch:
                        self.usage.add(item)
                        if item.finish_reason is not None:
                            metrics.ended(name, item.finish_reason)
                            self.times.end_s = now
                    yield index, batch
            self.times.end_s = time.monotonic()
        finally:
            self.close()

    def close(self) -> None:
        """Abort what still runs; called in the end, however it came."""
        if self in self._server.generations:
            self._server.generations.discard(self)
            if any(flight.open for flight in self.flights):
                self._server.metrics.ended(self.model.name, "abort")
            self.abort()
            for flight in self.flights:
                flight.collector.listener = None  # else only the collector of garbage frees them
            self._server.metrics.finished(self.model.name, self)

    async def _merged(self) -> AsyncGenerator[tuple[int, list[StreamDelta]], None]:
        if len(self.flights) == 1:
            async for batch in _until_deadline(self.flights[0]):
                yield 0, batch
            return
        queue: asyncio.Queue[tuple[int, list[StreamDelta] | BaseException | None]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_pour(index, flight, queue)) for index, flight in enumerate(self.flights)]
        try:
            num_open = len(tasks)
            while num_open:
                index, came = await queue.get()
                if isinstance(came, BaseException):
                    raise came
                num_open -= came is None
                if came is not None:
                    yield index, came
        finally:
            for task in tasks:
                task.cancel()

    def abort(self) -> None:
        engine = self.model.engine
        if engine is not None:
            engine.abort(*(flight for flight in self.flights if flight.open))

    def fail(self, error: PenstockError) -> None:
        """End it with an error, whatever has been said."""
        self.abort()
        for flight in self.flights:
            flight.fail(error)


async def _pour(
    index: int, flight: Flight, queue: asyncio.Queue[tuple[int, list[StreamDelta] | BaseException | None]]
) -> None:
    try:
        async for batch in _until_deadline(flight):
            queue.put_nowait((index, batch))
        queue.put_nowait((index, None))
    except Exception as error:
        queue.put_nowait((index, error))


async def _until_deadline(flight: Flight) -> AsyncIterator[list[StreamDelta]]:
    if flight.deadline_s is None:
        async for batch in flight.items():
            yield batch
        return
    items = flight.items()
    while True:
        try:
            batch = await asyncio.wait_for(anext(items), max(0.0, flight.deadline_s - time.monotonic()))
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise DeadlinePassed(
                f"the request did not end within its time of {flight.timeout_s:g} s: give it more "
                "(timeout), or ask for fewer tokens"
            ) from None
        yield batch
