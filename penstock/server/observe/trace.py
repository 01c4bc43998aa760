"""The timeline of one client request: stages that follow each other without gaps, from its first byte to its last."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.messages import Mark, RankRecord
from penstock.server.handover.asked import HandedOver
from penstock.server.observe.ranks import RankLoss, describe_facts

MAX_STAGES = 100  # further ones are in the totals alone
# states of an answer; the request is in the foremost state of all its answers
ANSWER_STATES = ("decode", "prefill", "preempted", "wait", "grammar", "restart", "queue")
SLOW_CLIENT = "the client is slow to read"
STAGES = ("receive", "load", "tokenize", *reversed(ANSWER_STATES), "respond", "slow_client", "more")


@dataclass(slots=True)
class TraceStage:
    name: str
    begin_s: float  # by time.monotonic()
    end_s: float
    why: str = ""
    tenants: Mapping[str, int] = field(default_factory=dict)  # requests of these were the reason
    then: str = ""  # why it took so long
    num_chunks: int = 0


class Trace:
    """Follows a request; its answers are keys of (prompt, sibling)."""

    def __init__(self, id: str = "", tenant: str = "", begun_s: float | None = None) -> None:
        self.id, self.tenant = id, tenant
        self.answer_id = ""  # of the response's body
        self.model = self.route = ""
        self.loras: tuple[str, ...] = ()  # names of its adapters
        self.begun_s = time.monotonic() if begun_s is None else begun_s
        self.begun_unix_s = time.time()
        self.end_s: float | None = None
        self.status: int | None = None
        self.finish_reasons: list[str] = []
        self.name, self.since_s = "receive", self.begun_s  # the present stage
        self.stages = [TraceStage(self.name, self.begun_s, self.begun_s)]
        self.sums: dict[str, float] = {}  # seconds by stage
        self._client_wait_s = 0.0  # waiting for the client to read, beside other stages too
        self._held_up_s: float | None = None  # since when a write waits for the client
        self.queued_s: float | None = None  # when it entered the queue, was first run, had its first and last token
        self.run_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.num_prompt = self.num_cached = self.num_output = 0
        self.num_drafts = self.num_accepted = 0
        self.num_chunks = self.num_preemptions = self.num_restarts = 0
        self.replicas: list[int] = []  # where its parts ran, where there are several
        self.ranks: list[tuple[int, Sequence[RankRecord]]] = []  # of the engine processes where its parts ran
        self.lost_ranks: list[RankLoss] = []  # that ended one of these
        self.taken: HandedOver | None = None  # the prompt, from the server that computed it
        self.num_fetched, self.fetch_s = 0, 0.0  # blocks that came from there, and how long that took
        self.outlives_connection = False  # it ends with its last token
        self.parent = ""  # a traceparent header
        self.energy_j: float | None = None
        self._answers: dict[tuple[int, int], str] = {}
        self._counts = dict.fromkeys(ANSWER_STATES, 0)

    def move(
        self, name: str, at_s: float | None = None, why: str = "", tenants: Mapping[str, int] | None = None
    ) -> None:
        """End the present stage and begin another."""
        if self.end_s is not None:
            return
        now = time.monotonic()
        now = max(self.since_s, now if at_s is None else min(at_s, now))
        self._close(now)
        self.name = name
        if len(self.stages) < MAX_STAGES:
            self.stages.append(TraceStage(name, now, now, why, tenants or {}))
        elif len(self.stages) == MAX_STAGES:
            self.stages.append(TraceStage("more", now, now, "further stages are in the totals"))

    def _close(self, now: float) -> None:
        self.sums[self.name] = self.sums.get(self.name, 0.0) + now - self.since_s
        self.stages[-1].end_s = self.since_s = now

    @contextmanager
    def within(self, name: str, why: str = "") -> Iterator[None]:
        """Be in a stage until the block ends, then in the one before."""
        before = self.name
        self.move(name, why=why)
        try:
            yield
        finally:
            self.move(before)

    def follow(
        self,
        answer: tuple[int, int],
        state: str | None,
        at_s: float | None = None,
        why: str = "",
        tenants: Mapping[str, int] | None = None,
    ) -> None:
        """Record an answer's state, None at its end."""
        before = self._answers.pop(answer, None)
        if before is not None:
            self._counts[before] -= 1
        if state is not None:
            self._answers[answer] = state
            self._counts[state] += 1
        if before == state:
            return
        foremost = next((one for one in ANSWER_STATES if self._counts[one]), "respond")
        if foremost == "respond" and self._held_up_s is not None:
            foremost, why = "slow_client", SLOW_CLIENT
        if foremost != self.name:
            self.move(foremost, at_s, why, tenants)
        if state == "queue" and self.queued_s is None:
            self.queued_s = self.since_s

    def find_state(self, answer: tuple[int, int]) -> str | None:
        """Return the state of an answer, None at its end."""
        return self._answers.get(answer)

    def mark(self, answer: tuple[int, int], mark: Mark) -> None:
        """Record what the engine noted of an answer."""
        if mark.kind == "prepared":
            why = f"its grammar took {mark.count / 1e3:.1f} ms to compile"
            if self.name == "grammar":
                self.stages[-1].why = why
            self.follow(answer, "wait", mark.at_s)
        elif mark.kind == "fetched":
            self.num_fetched, self.fetch_s = mark.total, mark.count / 1e6
            if self.name == "wait":
                self.stages[-1].then = f"{mark.total} blocks of its prompt were fetched in {mark.count / 1e3:.1f} ms"
        elif mark.kind == "preempt":
            self.num_preemptions += 1
            self.follow(answer, "preempted", mark.at_s, mark.why, {mark.tenant: 1} if mark.why else None)
        elif mark.kind == "run":
            self._run(answer, mark)
        else:
            self._chunk(answer, mark)

    def _run(self, answer: tuple[int, int], mark: Mark) -> None:
        if self.run_s is None:
            self.run_s = mark.at_s
        if self.name in ("wait", "preempted"):
            self.stages[-1].then = "; ".join(filter(None, (self.stages[-1].then, mark.why)))
        restored = f", {mark.count} of them restored from the store" if mark.count else ""
        self.follow(answer, "prefill", mark.at_s, f"{mark.start} tokens were cached{restored}" if mark.start else "")

    def _chunk(self, answer: tuple[int, int], mark: Mark) -> None:
        self.num_chunks += 1
        if self.name != "prefill" or len(self._answers) > 1:
            return
        last = self.stages[-1]
        beside = f", beside {mark.others} other rows" if mark.others else ""
        why = f"tokens {mark.start} to {mark.start + mark.count} of {mark.total}{beside}"
        if last.num_chunks:
            self.move("prefill", mark.at_s, why)
        else:
            last.why = f"{last.why}; {why}" if last.why else why
        self.stages[-1].num_chunks += 1

    def take_output(self, answer: tuple[int, int], finish_reason: str | None) -> None:
        """Record the first or last tokens of an answer."""
        now = time.monotonic()
        if self.first_s is None:
            self.first_s = now
        if finish_reason is not None:
            self.last_s = now
            if len(self.finish_reasons) < MAX_STAGES:
                self.finish_reasons.append(finish_reason)
        self.follow(answer, "decode" if finish_reason is None else None, now)

    def place(self, replica: int) -> None:
        """Record that a part is sent to a replica."""
        if replica not in self.replicas[-1:] and len(self.replicas) < MAX_STAGES:
            self.replicas.append(replica)

    def place_on_ranks(self, replica: int, ranks: Sequence[RankRecord]) -> None:
        """Record that a part is sent to an engine of several ranks."""
        if all(one is not ranks for _, one in self.ranks) and len(self.ranks) < MAX_STAGES:
            self.ranks.append((replica, ranks))

    def restart(self, loss: RankLoss | None) -> None:
        """Record that the engine of a part has died, and which of its ranks was lost, if that ended it."""
        self.num_restarts += 1
        if loss is not None and loss not in self.lost_ranks and len(self.lost_ranks) < MAX_STAGES:
            self.lost_ranks.append(loss)

    @contextmanager
    def wait_for_client(self) -> Iterator[None]:
        """Record that a write waits for the client to read, until the block ends."""
        begin_s = self._held_up_s = time.monotonic()
        if self.name == "respond":
            self.move("slow_client", begin_s, SLOW_CLIENT)
        try:
            yield
        finally:
            now, self._held_up_s = time.monotonic(), None
            self._client_wait_s += now - begin_s
            if self.name == "slow_client":
                self.move("respond", now)

    def finish(self, status: int | None = None) -> None:
        """End the timeline; only the first call counts."""
        if self.end_s is None:
            self.status = status
            self.end_s = max(time.monotonic(), self.since_s)
            self._close(self.end_s)
            self._answers.clear()

    @property
    def client_wait_s(self) -> float:
        """All time in which a write waited for the client, the present wait included."""
        if self._held_up_s is None:
            return self._client_wait_s
        return self._client_wait_s + (time.monotonic() if self.end_s is None else self.end_s) - self._held_up_s

    @property
    def e2e_s(self) -> float:
        return (time.monotonic() if self.end_s is None else self.end_s) - self.begun_s

    def is_named(self, id: str) -> bool:
        return id in (self.id, self.answer_id)


CURRENT: ContextVar[Trace | None] = ContextVar("penstock_trace", default=None)


@contextmanager
def stage(name: str, why: str = "") -> Iterator[None]:
    """Be in a stage of the current request's timeline, if it has one."""
    trace = CURRENT.get()
    if trace is None:
        yield
    else:
        with trace.within(name, why):
            yield


def format_trace(trace: Trace, *, sees_all: bool) -> dict[str, Any]:
    """Format for `/admin/requests/{id}`; other tenants are named to those who see all."""
    now = time.monotonic() if trace.end_s is None else trace.end_s
    stages, sums = [], dict(trace.sums)
    for at, one in enumerate(trace.stages):
        end_s = now if trace.end_s is None and at + 1 == len(trace.stages) else one.end_s
        stages.append(
            {
                "name": one.name,
                "start_s": round(one.begin_s - trace.begun_s, 6),
                "duration_s": round(max(0.0, end_s - one.begin_s), 6),
                "why": explain(one, trace.tenant, sees_all),
            }
        )
    if trace.end_s is None:
        sums[trace.name] = sums.get(trace.name, 0.0) + max(0.0, now - trace.since_s)
    return {
        "id": trace.answer_id or trace.id,
        "request_id": trace.id,
        "model": trace.model,
        "tenant": trace.tenant,
        "route": trace.route,
        "state": "finished" if trace.end_s is not None else trace.name,
        "status": trace.status,
        "finish_reasons": trace.finish_reasons,
        **({"replicas": trace.replicas} if trace.replicas else {}),
        **({} if trace.taken is None else {"handover": _format_handover(trace, trace.taken, sees_all)}),
        **(_format_ranks(trace) if sees_all and trace.ranks else {}),
        "begun": trace.begun_unix_s,
        "stages": stages,
        "totals": {
            "e2e_s": round(now - trace.begun_s, 6),
            **{f"{name}_s": round(seconds, 6) for name, seconds in sums.items()},
            "ttft_s": None if trace.first_s is None else round(trace.first_s - trace.begun_s, 6),
            "client_wait_s": round(trace.client_wait_s, 6),
            "prompt_tokens": trace.num_prompt,
            "cached_tokens": trace.num_cached,
            "output_tokens": trace.num_output,
            "draft_tokens": trace.num_drafts,
            "accepted_tokens": trace.num_accepted,
            "prompt_chunks": trace.num_chunks,
            "preemptions": trace.num_preemptions,
            "restarts": trace.num_restarts,
            **({} if trace.energy_j is None else {"energy_mj": round(1e3 * trace.energy_j, 3)}),
        },
    }


def _format_handover(trace: Trace, taken: HandedOver, sees_all: bool) -> dict[str, Any]:
    """Format where a request's prompt was computed, and how its blocks came from there."""
    return {
        **({"server": taken.server} if sees_all else {}),
        "prompt_tokens": taken.num_tokens,
        "prefill_s": round(taken.seconds, 6),
        "fetched_blocks": trace.num_fetched,
        "fetch_s": round(trace.fetch_s, 6),
    }


def _format_ranks(trace: Trace) -> dict[str, Any]:
    """Format the ranks of all engine processes where a request ran, and those that were lost meanwhile."""
    return {
        "ranks": [{"replica": replica, **describe_facts(one)} for replica, ranks in trace.ranks for one in ranks],
        "lost_ranks": [loss.describe() for loss in trace.lost_ranks],
    }


def explain(stage: TraceStage, tenant: str, sees_all: bool = True) -> str:
    """Say why a stage was, and why it took so long; without `sees_all` other tenants have no names."""
    return "; ".join(filter(None, (_explain(stage, tenant, sees_all), stage.then)))


def _explain(stage: TraceStage, tenant: str, sees_all: bool) -> str:
    """Say why a stage was; without `sees_all` other tenants have no names."""
    if not stage.tenants:
        return stage.why
    if stage.name in ("queue", "wait"):
        if sees_all:
            named = [f"{count} of {name}" if name else str(count) for name, count in stage.tenants.items()]
            return f"{stage.why}: {', '.join(named)}" if any(stage.tenants) else stage.why
        return f"{stage.why}: {stage.tenants.get(tenant, 0)} of your own"
    other = next(iter(stage.tenants))
    return f"{stage.why} (for {'another request' if other == tenant else other if sees_all else 'another tenant'})"
