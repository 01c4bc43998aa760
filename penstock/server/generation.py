"""Run a client's requests, all siblings of all prompts, until they end or the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import DeadlinePassed, PenstockError
from penstock.server.engines.direct import DirectWriter, Encode, OpenBody
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.http.relay import CURRENT_RELAY
from penstock.server.loras.registry import ServedLora
from penstock.server.model import ServedModel
from penstock.server.observe.trace import Trace
from penstock.server.openai.logprobs import count_prompt_logprobs
from penstock.text.ledger import format_ledger
from penstock.types import SamplingParams, StreamDelta

if TYPE_CHECKING:
    from penstock.server.metrics import Metrics


@dataclass
class Usage:
    """Token counts of a client's request."""

    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    energy_j: float | None = None  # where the hardware tells

    @property
    def energy(self) -> dict[str, float]:
        """The field of the energy, the same in every API; empty where the hardware does not tell."""
        return {} if self.energy_j is None else {"energy_mj": round(1e3 * self.energy_j, 3)}

    def count(self, num_output: int) -> dict[str, int]:
        """Return OpenAI's counts at `num_output` tokens of output."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": num_output,
            "total_tokens": self.num_prompt + num_output,
        }

    def to_openai(self) -> dict[str, object]:
        return {
            **self.count(self.num_output),
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            **self.energy,
        }


@dataclass
class Times:
    """Times of a client's request, by time.monotonic()."""

    begun_s: float
    first_s: float | None = None
    end_s: float | None = None
    trace: Trace | None = None

    def format_timings(self, usage: Usage) -> dict[str, float]:
        """Format as llama-server does, with the time before the prompt was begun in `queue_ms`."""
        end = self.end_s or time.monotonic()
        first = self.first_s or end
        run = self.begun_s if self.trace is None or self.trace.run_s is None else self.trace.run_s
        run = min(max(run, self.begun_s), first)
        prompt_ms, predicted_ms = 1e3 * (first - run), 1e3 * (end - first)
        computed, produced = usage.num_prompt - usage.num_cached, usage.num_output
        return {
            "queue_ms": 1e3 * (run - self.begun_s),
            "cache_n": usage.num_cached,
            "prompt_n": computed,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, computed),
            "prompt_per_second": 1e3 * computed / max(prompt_ms, 1e-3),
            "predicted_n": produced,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(1, produced),
            "predicted_per_second": 1e3 * produced / max(predicted_ms, 1e-3),
            **self._count_drafts(),
        }

    def _count_drafts(self) -> dict[str, float]:
        if self.trace is None or not self.trace.num_drafts:
            return {}
        return {"draft_n": self.trace.num_drafts, "draft_n_accepted": self.trace.num_accepted}


class Generation:
    """One or more requests as a single stream of (prompt number, deltas). Closing it early aborts them."""

    flights: Sequence[InFlightRequest] = ()
    includes_applied = False  # the response has the ledger

    def __init__(
        self,
        model: ServedModel,
        flights: Sequence[InFlightRequest],
        metrics: Metrics,
        on_close: Callable[[Generation], None],
        trace: Trace | None = None,
    ) -> None:
        self.trace = Trace() if trace is None else trace
        self.model, self._metrics, self._on_close, self._is_closed = model, metrics, on_close, False
        self.flights = list(flights)
        self.usage = Usage(num_prompt=sum(len(flight.request.tokens) for flight in flights))
        self.times = Times(min(flight.begun_s for flight in flights), trace=self.trace)
        self._last_s = 0.0  # of the last delta
        self.loras: list[ServedLora] = []  # held until it ends
        self.relay = CURRENT_RELAY.get()  # of a router that may continue it elsewhere
        self.open_body: OpenBody | None = None  # of the response

    @property
    def relaxed(self) -> dict[str, list[str]]:
        """The response's field of schema parts that were not enforced; empty if none."""
        named = dict.fromkeys(
            one
            for flight in self.flights
            if flight.request.grammar is not None
            for one in flight.request.grammar.relaxed
        )
        return {"relaxed": list(named)} if named else {}

    @property
    def ledger(self) -> dict[str, Any]:
        """The response's field of the ledger; empty unless it was asked for."""
        if not self.includes_applied:
            return {}
        applied = (one for flight in self.flights for one in flight.collector.list_applied())
        return {"penstock": format_ledger(applied)}

    @property
    def num_logprobs(self) -> int:
        """Upper bound of the logprobs in the whole response; a prompt's once per choice."""
        requests = [flight.request for flight in self.flights]
        max_top = max(
            (request.sampling.logprobs + 1 for request in requests if request.sampling.logprobs is not None), default=0
        )
        return max_top * self.usage.num_output + sum(
            count_prompt_logprobs(request.sampling, len(request.tokens)) for request in requests
        )

    def count_logprobs(self, batch: Sequence[StreamDelta], num_first: int = 0) -> int:
        """Count the logprobs in a batch's events, `num_first` of which show the prompt's."""
        sampling = self.flights[0].request.sampling if self.flights else SamplingParams()
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            return 0
        num_prompt = num_first * count_prompt_logprobs(sampling, batch[0].num_prompt_tokens) // sampling.n
        return num_prompt + sum(len(item.logprobs) for item in batch) * ((sampling.logprobs or 0) + 1)

    async def stream(self) -> AsyncGenerator[tuple[int, list[StreamDelta]], None]:
        try:
            async with contextlib.aclosing(self._merge()) as items:
                self._commit()
                async for index, batch in items:
                    self._record(batch, time.monotonic())
                    if self.relay is None:
                        yield index, batch
                        continue
                    for part in self.relay.cut(self.flights[index], batch):
                        yield index, part
                        self._commit()
            self.times.end_s = time.monotonic()
        finally:
            self.close()

    def _commit(self) -> None:
        """Mark for a router what is sent: whoever reads the stream asks for more."""
        if self.relay is not None:
            self.relay.commit(self.open_body)

    def _record(self, batch: Sequence[StreamDelta], now_s: float) -> None:
        """Count a batch of deltas, and the time since the one before."""
        if self.times.first_s is None:
            self.times.first_s = now_s
            self._metrics.observe_first(self.model.name, now_s - self.times.begun_s)
            self.usage.num_cached = sum(flight.num_cached for flight in self.flights)
        else:
            self._metrics.gaps.observe_gap(self.model.name, now_s - self._last_s, len(batch[-1].token_ids))
        self._last_s = now_s
        usage = self.usage
        usage.energy_j = self.trace.energy_j
        for item in batch:
            usage.num_output += len(item.token_ids)
            if item.finish_reason is not None:
                self._metrics.count_end(self.model.name, item.finish_reason)
                self.times.end_s = now_s

    def write_to(self, body: OpenBody, encode: Encode) -> None:
        """Write deltas to `body` as they come, while who reads `stream` waits for the next; `stream` yields the rest.
        Only for one prompt: the order of several is that of `stream`. Not for log probabilities of prompts, which take
        long to format."""
        engine, flight = self.model.engine, self.flights[0]
        request = flight.request
        if len(self.flights) == 1 and engine is not None and request.sampling.prompt_logprobs is None:
            if self.relay is not None:
                encode = self.relay.mark_each(flight, encode)
            flight.writer = DirectWriter(body, encode, self._record, self.fail, engine.dispatcher.unwritten)

    async def wait(self) -> None:
        """Run to the end; the output is in the flights' collectors."""
        async with contextlib.aclosing(self.stream()) as items:
            async for _ in items:
                pass

    def close(self) -> None:
        """Abort what still runs and count the result; called at every end, and only the first call counts."""
        if self._is_closed:
            return
        self._is_closed = True
        self._count_all()
        self._on_close(self)
        if any(flight.is_open for flight in self.flights):
            self._metrics.count_end(self.model.name, "abort")
        self.abort()
        self.model.loras.release(self.loras)
        for flight in self.flights:
            flight.collector.listener = flight.writer = None  # else only the garbage collector frees them
        self._metrics.observe(self.model.name, self)

    def _count_all(self) -> None:
        """Tell the timeline the request's figures."""
        trace, usage = self.trace, self.usage
        trace.num_prompt += usage.num_prompt
        trace.num_cached += usage.num_cached
        trace.num_output += usage.num_output

    async def _merge(self) -> AsyncGenerator[tuple[int, list[StreamDelta]], None]:
        if len(self.flights) == 1:
            async for batch in _iterate_until_deadline(self.flights[0]):
                yield 0, batch
            return
        queue: asyncio.Queue[tuple[int, list[StreamDelta] | BaseException | None]] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_forward(index, flight, queue)) for index, flight in enumerate(self.flights)]
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
            engine.abort(*(flight for flight in self.flights if flight.is_open))

    def fail(self, error: PenstockError) -> None:
        self.abort()
        for flight in self.flights:
            flight.fail(error)


async def _forward(
    index: int, flight: InFlightRequest, queue: asyncio.Queue[tuple[int, list[StreamDelta] | BaseException | None]]
) -> None:
    try:
        async for batch in _iterate_until_deadline(flight):
            queue.put_nowait((index, batch))
        queue.put_nowait((index, None))
    except Exception as error:
        queue.put_nowait((index, error))


async def _iterate_until_deadline(flight: InFlightRequest) -> AsyncIterator[list[StreamDelta]]:
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
                f"the request did not finish within {flight.timeout_s:g} s: raise timeout, or ask for fewer tokens"
            ) from None
        yield batch
