"""The loop: schedule, start, wait, commit. Overlap is how many plans may be started beyond the one awaited."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from penstock.cache.sessions import KeptSession
from penstock.engine.executor import (
    Answer,
    Awaited,
    Done,
    DropLora,
    EraseSession,
    Executor,
    LoadLora,
    SaveSession,
    Ticket,
)
from penstock.engine.loras import LoraSlots
from penstock.engine.plan import Output, Plan, Result
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.errors import RankLost
from penstock.types import Delta, Request


def prepare_nothing() -> bool:
    return False


NO_STORE = "there is no store to save a session to: start with --kv-offloading-path or --kv-offloading-size"


class Engine:
    def __init__(
        self, scheduler: Scheduler, executor: Executor, overlap: int = 0, prepare: Callable[[], bool] = prepare_nothing
    ) -> None:
        """`prepare` is called again and again while there is no work, until it returns False. It makes later steps
        faster, and each call is short."""
        self.scheduler = scheduler
        self.executor = executor
        scheduler.plan_trees(executor.verifies_trees)
        self.loras.connect(executor.control)
        self.overlap = overlap
        self.prepare = prepare
        self.watch: Callable[[Plan], None] | None = None  # is told of each plan before it is started
        self.awaits_loras = False  # the last step had nothing to do but to wait for adapters
        self.late: list[Delta] = []  # that came while something else was waited for
        self._started: deque[tuple[Plan, Ticket[Result]]] = deque()

    @property
    def loras(self) -> LoraSlots:
        return self.scheduler.roster.loras

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._started or self.late)

    @property
    def has_saves(self) -> bool:
        """True if something fell idle that the store may not have."""
        saves = self.scheduler.cache.saves
        return saves is not None and bool(saves.idle)

    def forget_prefixes(self) -> None:
        """Drop every cached prefix that no sequence uses now, from the store too."""
        cache = self.scheduler.cache
        cache.tree.clear()
        if cache.saves is not None:
            cache.saves.forget()

    def add(
        self,
        request: Request,
        outputs: Mapping[int, Sequence[int]] | None = None,
        mus: Mapping[int, float] | None = None,
    ) -> None:
        self.scheduler.add(request, outputs, mus)

    def abort(self, request_id: str, sibling: int | None = None, reason: str = "abort") -> list[Delta]:
        return self.scheduler.abort(request_id, sibling, reason)

    def start(self) -> bool:
        """Start one plan, if anything can be planned; `step` waits for it. None is started after one for which a model
        drafts: its drafts come with its result."""
        if self._started and _brings_drafts(self._started[-1][0]):
            return False
        plan = self.scheduler.schedule()
        if plan is not None:
            if self.watch is not None:
                self.watch(plan)
            self._started.append((plan, self.executor.start(plan)))
        return plan is not None

    def poll(self) -> list[Delta]:
        """Take in the adapters that have been read; returns the ends of requests whose adapters could not be."""
        return self.scheduler.poll_loras() if self.loras.is_loading else []

    def step(self, waits_for_loras: bool = True) -> list[Delta]:
        """Start what can be started, then wait for the oldest plan and account for it. Where adapters are all there is
        to wait for, it may return at once."""
        self.awaits_loras, failed = False, self.poll() + self._take_late()
        while len(self._started) <= self.overlap and self.start():
            pass
        if not self._started:
            if self.loras.is_loading and not failed and self.scheduler.has_work:
                self.awaits_loras = True
                if waits_for_loras:
                    self.loras.wait()
            elif self.scheduler.has_work and not failed:
                raise RuntimeError("the scheduler has work but plans none of it")
            return failed
        return failed + self._end_one() + self._save_urgent()

    def _take_late(self) -> list[Delta]:
        late, self.late = self.late, []
        return late

    def _end_one(self) -> list[Delta]:
        """Wait for the oldest plan and account for it."""
        plan, ticket = self._started.popleft()
        return self.scheduler.commit(plan, ticket.result())

    def _save_urgent(self) -> list[Delta]:
        """Save what others wait for before they are told; returns what the plans started before that gave."""
        deltas: list[Delta] = []
        saves = self.scheduler.cache.saves
        while saves is not None and saves.is_urgent:
            saves.is_urgent = False
            while self._started:
                deltas += self._end_one()
            while (plan := self.scheduler.schedule(computes=False)) is not None:
                self.scheduler.commit(plan, self.executor.start(plan).result())
            saves.store.flush()
        return deltas

    def save(self, everything: bool = False) -> None:
        """While there are no requests, save some of what fell idle, or all of it."""
        while not self.has_work and self.has_saves and self.start():
            self._end_one()
            if not everything:
                return

    def control(self, message: object) -> Answer:
        """Have a message obeyed after the plans started so far."""
        answer = self.tell(message).result()
        self.loras.poll()
        return answer

    def tell(self, message: object) -> Awaited[Answer]:
        """As `control`, without waiting: adapters are read while steps go on."""
        if isinstance(message, LoadLora):
            return self.loras.load(message)
        if isinstance(message, SaveSession | EraseSession):
            return Done(self._tell_session(message))
        if not isinstance(message, DropLora):
            return self.executor.control(message)
        if self.scheduler.roster.uses_lora(message.number):
            return Done(Answer(error=f"adapter {message.number} is in use: end its requests first"))
        return self.loras.drop(message.number)

    def _tell_session(self, message: SaveSession | EraseSession) -> Answer:
        sessions, saves = self.scheduler.roster.sessions, self.scheduler.cache.saves
        name = message.tenant, message.name
        session = sessions.find(name)
        if session is None:
            return Answer({"num_positions": 0})
        if isinstance(message, EraseSession):
            sessions.erase(name)
        elif saves is None:
            return Answer(error=NO_STORE)
        else:
            saves.hasten(session.node)
            self.late += self._save_urgent()
            return Answer({"num_positions": session.num_positions, **_describe_session(session)})
        return Answer({"num_positions": session.num_positions})

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and what runs now."""
        roster, cache = self.scheduler.roster, self.scheduler.cache
        counters = asdict(self.scheduler.stats)
        accepted, drafters = counters.pop("num_accepted_at"), counters.pop("drafters")
        return {
            **counters,
            **{f"num_accepted_at_{place}": count for place, count in enumerate(accepted)},
            **{f"num_draft_tokens_of_{name}": verified for name, (verified, _) in drafters.items()},
            **{f"num_accepted_tokens_of_{name}": right for name, (_, right) in drafters.items()},
            "num_sessions": len(roster.sessions),
            "num_running": len(roster.running),
            "num_waiting": len(roster.waiting),
            "num_evicted_blocks": cache.tree.num_evicted,
            "num_copied_blocks": cache.copies.num_copied,
            "num_blocks": cache.pool.num_blocks,
            "num_used_blocks": cache.pool.num_used,
            "num_cached_blocks": cache.pool.num_idle,
            "num_loaded_blocks": cache.loads.num_loaded,
            **(cache.saves.count() if cache.saves is not None else {}),
            **self.loras.count(),
        }

    def close(self) -> None:
        with suppress(RankLost):  # whoever waited for it was told
            self.save(everything=True)
            for _, ticket in self._started:
                ticket.result()
        self._started.clear()
        self.executor.close()


def _brings_drafts(plan: Plan) -> bool:
    """True if a model drafts for some of the plan's rows."""
    return plan.ahead > 0 and any(row.output is Output.SAMPLE for row in plan.rows)


def _describe_session(session: KeptSession) -> dict[str, Any]:
    """Describe what a session's prefix is found by: tokens, adapters and salt."""
    loras = [[use.name, use.scale] for use in session.request.loras]
    return {"tokens": list(session.tokens), "loras": loras, "salt": session.request.salt}
