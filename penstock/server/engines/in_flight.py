"""Requests in flight, and the rows of the engine they use, by tenant and by client request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import InvalidRequest, PenstockError
from penstock.server.engines.direct import DirectWriter
from penstock.server.engines.prefixes import digest_blocks
from penstock.server.engines.queues import PromptQueue
from penstock.server.observe.trace import Trace
from penstock.text.answers import Collector
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import Delta, Request, StreamDelta

if TYPE_CHECKING:
    from penstock.server.engines.replica import Replica

_NO_TOKENS: list[int] = []  # never mutated
STARTED_COST = 8  # cost of preempting a part with output; 1 without
MAX_PREEMPTION_COST = 64  # then a part is no longer preempted


class RequestPart:
    """Siblings of a request that are sent to the engine as one request. It survives engines; `id` is new each time it
    is sent."""

    def __init__(self, flight: InFlightRequest, siblings: Iterable[int]) -> None:
        self.flight = flight
        self.siblings = set(siblings)  # unfinished
        self.id = ""
        self.num_tokens = 0  # since it was last sent
        self.num_deaths = 0  # consecutive crashes with it, without progress
        self.num_trials_lost = 0  # crashes while it alone was on trial
        self.num_strikes = 0  # consecutive such crashes before its first token
        self.max_group = 1 << 30  # max size of its trial group
        self.trial_s = 0.0  # duration of an inconclusive trial; 0: not tried yet
        self.preemption_cost = 0  # of its preemptions so far
        self.replica: Replica | None = None  # it was sent to last
        self._first, self._num_sent = min(self.siblings), 0

    @property
    def engine(self) -> Replica:
        """The engine that it was sent to."""
        assert self.replica is not None
        return self.replica

    def split(self, size: int) -> RequestPart | None:
        """Keep `size` siblings; return the others as a part of their own."""
        if len(self.siblings) <= size:
            return None
        rest = sorted(self.siblings)[size:]
        self.siblings.difference_update(rest)
        return RequestPart(self.flight, rest)

    def next_request(self) -> Request:
        request = self.flight.request
        is_whole = self._num_sent == 0 and len(self.siblings) == request.num_siblings
        self.id = request.id if is_whole else f"{request.id}.{self._first}.{self._num_sent}"
        self._num_sent += 1
        self.num_tokens = 0
        return request if is_whole else replace(request, id=self.id)

    @property
    def outputs(self) -> dict[int, list[int]] | None:
        """Tokens so far of the unfinished siblings; None if nothing has started."""
        outputs = {sibling: self.flight.outputs[sibling] for sibling in sorted(self.siblings)}
        return outputs if len(outputs) < self.flight.request.num_siblings or any(outputs.values()) else None


class InFlightRequest:
    """A request with its tokens, held by the API process until the last one, so that no crash loses any."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        *,
        tenant: str = "",
        deadline_s: float | None = None,
        trace: Trace | None = None,
        number: int = 0,
    ) -> None:
        """`number`: of the prompt in the client's request."""
        self.request = request
        self.trace, self.number = Trace(begun_s=0.0) if trace is None else trace, number
        self.tenant = tenant
        self.deadline_s = deadline_s  # by time.monotonic()
        self.collector = Collector(request, prompt, tokenizer)
        self.collector.listener = self._push
        self.collector.adds_prompt_texts = False
        self.outputs = dict.fromkeys(range(request.num_siblings), _NO_TOKENS)  # tokens of unfinished siblings
        self.mus: dict[int, float] = {}  # mirostat's mu after those tokens
        self.parts = deque([RequestPart(self, range(request.num_siblings))])  # waiting
        self.queue: PromptQueue | None = None
        self._digests: tuple[bytes, ...] | None = None
        self.is_charged = False  # its prompt is paid for
        self.begun_s = time.monotonic()
        self.writer: DirectWriter | None = None  # of a response that has begun
        self._items: deque[StreamDelta | PenstockError | None] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of `items`: all before is sent
        self._num_cached: int | None = None
        self.handed_over_at: int | None = None  # port from which other servers fetch its prompt's blocks
        self.num_muted = 0  # items at the beginning of what comes that the client has already

    @property
    def is_open(self) -> bool:
        return bool(self.outputs)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digests of the prompt's blocks, within the scope that shares prefixes; computed on demand."""
        if self._digests is None:
            request = self.request
            self._digests = digest_blocks((self.tenant, request.salt, request.lora_key), request.tokens)
        return self._digests

    @property
    def num_cached(self) -> int:
        """Prompt tokens found in the prefix cache when first computed."""
        return self._num_cached or 0

    def replay(self, delta: Delta) -> None:
        """Take tokens that the client has already; what comes of them is muted."""
        before = len(self._items)
        self.push(delta)
        self.num_muted += len(self._items) - before

    def keep_open_parts(self) -> None:
        """Leave ended siblings out of what is sent to engines."""
        self.parts = deque([RequestPart(self, self.outputs)] if self.outputs else ())

    @property
    def timeout_s(self) -> float:
        return (self.deadline_s or self.begun_s) - self.begun_s

    def push_token(self, delta: Delta) -> bool:
        """Add a delta that is one token, if a writer takes it; False, changing nothing, if it takes a `push`."""
        writer, tokens = self.writer, self.outputs.get(delta.sibling)
        if self._waiter is None or writer is None or not tokens or not writer.body.is_ready:
            return False
        item = self.collector.add_token(delta.sibling, delta.tokens[0])
        if item is None:
            return False
        tokens.append(delta.tokens[0])
        writer.add(item)
        return True

    def push(self, delta: Delta) -> bool:
        """Add a step's delta; True if the engine must be told to stop this sibling."""
        if delta.sibling not in self.outputs:
            return False
        if self._num_cached is None:
            self._num_cached = delta.num_cached_tokens
        elif delta.num_cached_tokens != self._num_cached:
            delta = msgspec.structs.replace(delta, num_cached_tokens=self._num_cached)
        tokens = self.outputs[delta.sibling]
        if tokens:
            tokens += delta.tokens
        else:
            self.outputs[delta.sibling] = list(delta.tokens)
            self.trace.take_output((self.number, delta.sibling), None)
        for drafts in delta.drafts:
            self.trace.num_drafts += drafts.num_verified
            self.trace.num_accepted += drafts.num_accepted
        if delta.mu is not None:
            self.mus[delta.sibling] = delta.mu
        ends_here = self.collector.push(delta)
        if ends_here or delta.finish_reason is not None:
            del self.outputs[delta.sibling]
            self.trace.take_output((self.number, delta.sibling), delta.finish_reason or "stop")
        if delta.error is not None:
            self.fail(InvalidRequest(delta.error) if delta.unfit else PenstockError(f"the model failed: {delta.error}"))
        elif self.request.pool and not self.outputs:
            self._put(None)
        return ends_here

    def _push(self, item: StreamDelta) -> None:
        if self._waiter is not None and self.writer is not None and self.writer.take(item):
            return
        if not self.request.pool:
            self._put(item)

    def follow(
        self, siblings: Iterable[int], state: str | None, why: str = "", tenants: Mapping[str, int] | None = None
    ) -> None:
        """Record the state of some siblings in the request's timeline."""
        for sibling in siblings:
            self.trace.follow((self.number, sibling), state, None, why, tenants)

    def fail(self, error: PenstockError) -> None:
        self.follow(range(self.request.num_siblings), None)
        self.outputs.clear()
        self._put(error)

    def _put(self, item: StreamDelta | PenstockError | None) -> None:
        if self.writer is not None:
            self.writer.flush(time.monotonic())  # what came before
        self._items.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        """Wait for an item. Who asks for the next one has sent those before, so a writer may write meanwhile."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def items(self) -> AsyncIterator[list[StreamDelta]]:
        """Yield batches of deltas until every sibling has ended; a `writer` takes some of them instead."""
        num_open = self.request.num_siblings
        while num_open:
            await self._wait()
            batch = list(self._items)
            self._items.clear()
            ready: list[StreamDelta] = []
            for item in batch:
                if isinstance(item, PenstockError):
                    if ready:
                        yield ready
                    raise item
                if item is None:
                    return
                ready.append(item)
                is_end = item.finish_reason is not None and not (self.request.beam and item.index)
                num_open -= is_end
            if ready:
                yield ready


class Occupancy:
    def __init__(self) -> None:
        self._parts: dict[str, RequestPart] = {}  # by id, oldest first
        self._tenants: Counter[str] = Counter()
        self._queues: Counter[PromptQueue | None] = Counter()
        self.num_rows = 0

    def __iter__(self) -> Iterator[RequestPart]:
        return iter(self._parts.values())

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, id: str) -> RequestPart | None:
        return self._parts.get(id)

    def add(self, part: RequestPart) -> None:
        self._parts[part.id] = part
        self._count(part, len(part.siblings))

    def end_sibling(self, part: RequestPart, sibling: int) -> None:
        part.siblings.discard(sibling)
        part.engine.num_rows -= 1
        self._count(part, -1)

    def remove(self, part: RequestPart) -> bool:
        """Remove a part; False if it is not here."""
        if self._parts.pop(part.id, None) is None:
            return False
        self._count(part, -len(part.siblings))
        return True

    @property
    def tenants(self) -> list[str]:
        return list(self._tenants)

    def count_tenants(self, max_tenants: int) -> dict[str, int]:
        """Count the rows of the tenants that have most of them."""
        return dict(self._tenants.most_common(max_tenants))

    def _count(self, part: RequestPart, change: int) -> None:
        self.num_rows += change
        for counts, key in ((self._tenants, part.flight.tenant), (self._queues, part.flight.queue)):
            counts[key] += change  # type: ignore[index]
            if counts[key] <= 0:  # type: ignore[index]
                del counts[key]

    def find_preemptible(
        self,
        flight: InFlightRequest,
        shares: Mapping[str, float],
        max_rows: int,
        is_protected: Callable[[RequestPart], bool],
    ) -> list[RequestPart]:
        """List parts to preempt for `flight`, newest first: of the tenant furthest over its share, or of the tenant's
        own largest request."""
        if self.num_rows < max_rows:
            return []
        size = len(flight.parts[0].siblings) if flight.parts else 1
        over = {
            name: count / shares[name]
            for name, count in self._tenants.items()
            if name != flight.tenant and count > shares[name] * max_rows
        }
        own = self._tenants[flight.tenant]
        if over and (not own or own + size <= shares[flight.tenant] * max_rows):
            worst = max(over, key=over.__getitem__)
            floor = shares[worst] * max_rows
            return self._find_newest(
                lambda part: part.flight.tenant == worst and not is_protected(part),
                self._tenants[worst],
                floor,
                max_rows - size,
            )
        if flight.queue in self._queues:
            return []
        queues = {part.flight.queue for part in self if part.flight.tenant == flight.tenant}
        queue = max(queues, key=lambda one: self._queues[one], default=None)
        if queue is None:
            return []
        return self._find_newest(
            lambda part: part.flight.queue is queue and not is_protected(part), self._queues[queue], 1, max_rows - size
        )

    def _find_newest(
        self, fits: Callable[[RequestPart], bool], has: int, floor: float, max_rows: int
    ) -> list[RequestPart]:
        """List the newest parts until `max_rows` rows are used; their owner keeps `floor` rows."""
        found: list[RequestPart] = []
        num_rows = self.num_rows
        for part in reversed(self._parts.values()):
            if num_rows <= max(0, max_rows):
                break
            cost = STARTED_COST if part.num_tokens else 1
            if fits(part) and has - len(part.siblings) >= floor and part.preemption_cost + cost <= MAX_PREEMPTION_COST:
                found.append(part)
                has -= len(part.siblings)
                num_rows -= len(part.siblings)
        return found
