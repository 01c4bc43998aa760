"""Replicas without a device: the server's own dispatcher, the engine's own scheduler and cache, and virtual time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.cache.group import Group, StateSpec
from penstock.cache.kv import KVCache
from penstock.engine.engine import Engine
from penstock.engine.executor import Answer, Awaited, Done, Ticket
from penstock.engine.messages import Abort, Add
from penstock.engine.plan import Output, Plan, Result, RowResult
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.dispatcher import Dispatcher
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.replica import Replica, Replicas
from penstock.types import Request, SamplingParams

BLOCK_SIZE = 16
STEP_TOKENS = 512
STEP_COST = 32  # tokens that a step costs beside its own
MAX_WAITING = 1 << 20


class Counter:
    """An executor that samples a number from the row and the place."""

    verifies_trees = False

    def start(self, plan: Plan) -> Ticket[Result]:
        results: list[RowResult | int] = [RowResult() for _ in plan.rows]
        for at, row in enumerate(plan.rows):
            if row.output is Output.SAMPLE:
                results[at] = (row.row * 7919 + row.start * 31) % 1000
        return Done(Result(plan.number, results))

    def control(self, message: object) -> Awaited[Answer]:
        return Done(Answer())

    def close(self) -> None:
        pass


class FleetModel:
    """`size` replicas of so many cache tokens and rows each; `choose` replaces the choice of a replica."""

    def __init__(
        self, size: int, cache_tokens: int, num_rows: int, choose: Callable[[list[Replica]], Replica] | None = None
    ) -> None:
        self.dispatcher = Dispatcher(AdmissionQueue(MAX_WAITING, MAX_WAITING * 4096))
        if choose is not None:
            self.dispatcher.replicas = ScriptedReplicas(choose)
        self.now = 0.0
        self.busy = [0.0] * size  # time in which each replica computed
        self.waits: dict[str, float] = {}  # until the first token; before it, the time of asking, negative
        self.engines: list[Engine] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._is_stepping: set[int] = set()
        self._ends: dict[str, Callable[[list[int]], None]] = {}
        self._flights: dict[str, InFlightRequest] = {}
        self._answers: dict[str, list[int]] = defaultdict(list)
        for number in range(size):
            cache = KVCache(cache_tokens // BLOCK_SIZE, BLOCK_SIZE, (Group(StateSpec("full", 1), (0,)),), True)
            scheduler = Scheduler(cache, max_num_seqs=num_rows, max_num_batched_tokens=STEP_TOKENS)
            self.engines.append(Engine(scheduler, Counter(), 0))
            replica = self.dispatcher.replicas.add(partial(self._obey, number))
            self.dispatcher.open(replica, num_rows, cache_tokens)

    def at(self, time_s: float, work: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, work))

    def ask(self, tokens: list[int], num_answer: int, end: Callable[[list[int]], None]) -> None:
        """Submit a prompt now; `end` gets the answer."""
        id = f"r{len(self._ends)}"
        request = Request(
            id=id, tokens=tuple(tokens), sampling=SamplingParams(max_tokens=num_answer), max_tokens=num_answer
        )
        self._ends[id] = end
        self.waits[id] = -self.now
        self._flights[id] = flight = InFlightRequest(request, None, None)
        self.dispatcher.submit(flight)

    def run(self) -> None:
        while self._events:
            self.now, _, work = heapq.heappop(self._events)
            work()

    def _obey(self, number: int, command: Add | Abort | Any) -> None:
        if isinstance(command, Add):
            self.engines[number].add(command.request, command.outputs, command.mus)
            self._step(number)

    def _step(self, number: int) -> None:
        engine = self.engines[number]
        if number in self._is_stepping or not engine.has_work:
            return
        self._is_stepping.add(number)
        before = engine.scheduler.stats.num_prompt_tokens - engine.scheduler.stats.num_cached_tokens
        deltas = engine.step()
        computed = engine.scheduler.stats.num_prompt_tokens - engine.scheduler.stats.num_cached_tokens - before
        took = STEP_COST + len(deltas) + computed
        self.busy[number] += took

        def end() -> None:
            self._is_stepping.discard(number)
            for delta in deltas:
                if delta.tokens and delta.request_id not in self._answers:
                    self.waits[delta.request_id] += self.now
                self._answers[delta.request_id] += delta.tokens
            self.dispatcher.handle_deltas(deltas)
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._ends[delta.request_id](self._answers.pop(delta.request_id))
            self._step(number)

        self.at(self.now + took, end)

    @property
    def num_computed(self) -> int:
        """Prompt tokens that were computed."""
        stats = [engine.scheduler.stats for engine in self.engines]
        return sum(one.num_prompt_tokens - one.num_cached_tokens for one in stats)

    @property
    def imbalance(self) -> float:
        """The busiest replica's time over the mean."""
        return max(self.busy) * len(self.busy) / sum(self.busy)

    @property
    def num_prompt(self) -> int:
        return sum(engine.scheduler.stats.num_prompt_tokens for engine in self.engines)


class ScriptedReplicas(Replicas):
    """Replicas chosen by another rule."""

    def __init__(self, choose: Callable[[list[Replica]], Replica]) -> None:
        super().__init__()
        self._choose = choose

    def choose(self, flight: InFlightRequest) -> Replica:
        return next(one for one in self if one.is_open)

    def fits(self, flight: InFlightRequest) -> bool:
        return True

    def choose_with_room(self, flight: InFlightRequest) -> Replica:
        return self._choose([one for one in self if one.has_room])


def take_turns() -> Callable[[list[Replica]], Replica]:
    """Return a rule that names replicas in turn."""
    counts: dict[int, int] = defaultdict(int)

    def choose(replicas: list[Replica]) -> Replica:
        chosen = min(replicas, key=lambda one: (counts[one.number], one.number))
        counts[chosen.number] += 1
        return chosen

    return choose


def least_busy(replicas: list[Replica]) -> Replica:
    return min(replicas, key=lambda one: (one.work, one.number))
