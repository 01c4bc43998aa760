"""A request's timeline: stages without gaps that add up to its wall time, whatever happens to its answers."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from penstock.engine.messages import Mark
from penstock.server.engines.dispatcher import _describe_rows
from penstock.server.engines.in_flight import Occupancy
from penstock.server.engines.replica import Replica
from penstock.server.observe.ring import TraceRing
from penstock.server.observe.trace import ANSWER_STATES, MAX_STAGES, Trace, format_trace

ALONE = (0, 0)
KINDS: list[Literal["prepared", "run", "chunk", "preempt"]] = ["prepared", "run", "chunk", "preempt"]


def check_sums(shown: dict[str, Any]) -> None:
    """Require that stages follow each other and add up, and that totals do too."""
    at_s = 0.0
    for stage in shown["stages"]:
        assert stage["start_s"] == pytest.approx(at_s, abs=3e-6)
        at_s = stage["start_s"] + stage["duration_s"]
    e2e_s = shown["totals"]["e2e_s"]
    assert at_s == pytest.approx(e2e_s, abs=1e-5)
    sums = [value for name, value in shown["totals"].items() if name not in ("e2e_s", "ttft_s", "client_wait_s")]
    assert sum(value for value in sums if isinstance(value, float)) == pytest.approx(e2e_s, abs=1e-4)


def names(trace: Trace) -> list[str]:
    return [stage.name for stage in trace.stages]


def test_a_request_on_its_way() -> None:
    trace = Trace("req_1", "alice")
    trace.move("tokenize")
    trace.follow(ALONE, "queue", why="behind 3 requests", tenants={"alice": 1, "bob": 2})
    trace.follow(ALONE, "wait")
    now = time.monotonic()
    time.sleep(0.003)
    trace.mark(ALONE, Mark("r", 0, "run", now, start=16, why="all rows were taken"))
    trace.mark(ALONE, Mark("r", 0, "chunk", now + 0.001, start=16, count=32, total=80))
    trace.mark(ALONE, Mark("r", 0, "chunk", now + 0.002, start=48, count=32, total=80, others=2))
    trace.take_output(ALONE, None)
    trace.mark(ALONE, Mark("r", 0, "preempt", time.monotonic(), why="its blocks were needed", tenant="bob"))
    trace.mark(ALONE, Mark("r", 0, "run", time.monotonic(), why="there were not enough free blocks"))
    trace.take_output(ALONE, None)
    trace.take_output(ALONE, "length")
    trace.finish(200)
    ways = ["receive", "tokenize", "queue", "wait", "prefill", "prefill", "decode", "preempted", "prefill", "decode"]
    assert names(trace) == [*ways, "respond"]
    shown = format_trace(trace, sees_all=True)
    check_sums(shown)
    why = {stage["name"]: stage["why"] for stage in shown["stages"]}
    assert why["queue"] == "behind 3 requests: 1 of alice, 2 of bob"
    assert why["wait"] == "all rows were taken"
    assert why["preempted"] == "its blocks were needed (for bob); there were not enough free blocks"
    assert [stage["why"] for stage in shown["stages"] if stage["name"] == "prefill"][:2] == [
        "16 tokens were cached; tokens 16 to 48 of 80",
        "tokens 48 to 80 of 80, beside 2 other rows",
    ]
    assert (shown["totals"]["prompt_chunks"], shown["totals"]["preemptions"]) == (2, 1)
    assert (shown["state"], shown["status"], shown["finish_reasons"]) == ("finished", 200, ["length"])
    hidden = str(format_trace(trace, sees_all=False))
    assert "bob" not in hidden and "another tenant" in hidden and "1 of your own" in hidden


@pytest.mark.parametrize("seed", range(20))
def test_any_history_adds_up_and_is_bounded(seed: int) -> None:
    draw = random.Random(seed)
    trace = Trace("req")
    answers = [(prompt, sibling) for prompt in range(draw.randint(1, 3)) for sibling in range(draw.randint(1, 4))]
    for _ in range(400):
        answer, state = draw.choice(answers), draw.choice([*ANSWER_STATES, None])
        at_s = time.monotonic() + draw.uniform(-0.01, 0.001)  # the engine tells of the past, out of order
        if draw.random() < 0.3:
            kind = draw.choice(KINDS)
            trace.mark(answer, Mark("r", answer[1], kind, at_s, 1, 2, 3, 4, "why", "bob"))
        else:
            trace.follow(answer, state, min(at_s, time.monotonic()))
        if draw.random() < 0.1:
            with trace.wait_for_client():
                trace.follow(answer, draw.choice([*ANSWER_STATES, None]))
                check_sums(format_trace(trace, sees_all=True))
            check_sums(format_trace(trace, sees_all=True))
    trace.finish(200)
    assert len(trace.stages) <= MAX_STAGES + 1 and (len(trace.stages) > MAX_STAGES) == ("more" in names(trace))
    check_sums(format_trace(trace, sees_all=False))


def test_after_a_hundred_stages_there_are_sums_alone() -> None:
    trace = Trace()
    for number in range(MAX_STAGES):
        trace.follow(ALONE, "preempted" if number % 2 else "decode")
    trace.finish()
    assert len(trace.stages) == MAX_STAGES + 1 and names(trace)[-1] == "more"
    assert set(trace.sums) == {"receive", "decode", "preempted"}
    check_sums(format_trace(trace, sees_all=True))


def test_the_foremost_answer_gives_the_stage() -> None:
    trace = Trace()
    one, two = (0, 0), (0, 1)
    for answer in (one, two):
        trace.follow(answer, "wait")
    trace.follow(one, "prefill")
    trace.follow(one, "decode")
    trace.follow(two, "prefill")
    assert trace.name == "decode"
    trace.take_output(one, "stop")
    assert trace.name == "prefill"
    trace.take_output(two, "stop")
    assert trace.name == "respond" and trace.finish_reasons == ["stop", "stop"]


def test_a_slow_client_is_told_while_it_is_slow() -> None:
    trace = Trace()
    trace.follow(ALONE, "decode")
    with trace.wait_for_client():  # while tokens are made, and beyond
        time.sleep(0.005)
        assert names(trace) == ["receive", "decode"] and trace.client_wait_s >= 0.005
        trace.take_output(ALONE, "stop")
        time.sleep(0.005)
        shown = format_trace(trace, sees_all=True)
        assert shown["state"] == "slow_client" and shown["totals"]["client_wait_s"] >= 0.01
        assert shown["stages"][-1]["why"] == "the client is slow to read" and shown["stages"][-1]["duration_s"] >= 0.005
        check_sums(shown)
    assert trace.name == "respond"
    with trace.wait_for_client():  # a write that begins after the last token
        assert trace.name == "slow_client"
    trace.finish()
    assert names(trace)[-4:] == ["slow_client", "respond", "slow_client", "respond"]
    assert trace.client_wait_s >= trace.sums["slow_client"] >= 0.005


def test_a_connection_that_breaks_while_it_is_slow() -> None:
    trace = Trace()
    trace.follow(ALONE, None)
    with pytest.raises(ConnectionError), trace.wait_for_client():
        trace.take_output(ALONE, "stop")
        raise ConnectionError
    trace.finish(200)
    check_sums(format_trace(trace, sees_all=True))


def test_the_ring_forgets_the_oldest_and_keeps_tenants_apart() -> None:
    ring = TraceRing(max_ended=3)
    traces = [Trace(f"req_{number}", tenant=f"tenant{number % 2}") for number in range(5)]
    for trace in traces:
        ring.enter(trace)
        ring.name(trace, trace.id.replace("req", "chatcmpl"))
    ring.end(traces[4])
    for trace in traces[:4]:
        ring.end(trace)
    assert ring.find("req_4", None) is None and ring.find("chatcmpl-0", None) is None and len(ring) == 3
    assert ring.find("chatcmpl_3", "tenant1") is traces[3] and ring.find("chatcmpl_3", "tenant0") is None
    twin = Trace("req_3", tenant="tenant0")  # a client chooses an id that another has
    ring.enter(twin)
    assert ring.find("req_3", None) is twin
    assert ring.find("req_3", "tenant1") is traces[3] and ring.find("req_3", "tenant0") is twin
    for _ in range(100):
        ring.enter(other := Trace("same"))
        ring.end(other)
    assert len(ring) == 4 and len(ring._by_id) == 2


def test_who_waits_in_the_engine_is_told_behind_whom() -> None:
    parts, replica = Occupancy(), Replica(0, lambda command: None)

    def describe(max_rows: int | None, has_others: bool = False) -> tuple[str, dict[str, int]]:
        replica.max_rows = max_rows
        return _describe_rows(replica, parts, has_others)

    assert describe(2) == ("", {}) == describe(None)
    assert describe(2, True) == ("on replica 0", {})
    for id, tenant, siblings in (("a", "bob", {0, 1}), ("b", "alice", {0})):
        flight = SimpleNamespace(tenant=tenant, queue=None)
        parts.add(SimpleNamespace(id=id, siblings=siblings, flight=flight))  # type: ignore[arg-type]
        replica.num_rows += len(siblings)
    assert describe(4) == ("a step was under way", {})
    why, tenants = describe(3)
    assert (why, tenants) == ("behind 3 answers in the engine", {"bob": 2, "alice": 1})
    trace = Trace("req_1", "alice")
    trace.follow(ALONE, "wait", None, why, tenants)
    trace.mark(ALONE, Mark("r", 0, "run", time.monotonic(), why="all rows were taken"))
    told = {sees_all: format_trace(trace, sees_all=sees_all)["stages"][1]["why"] for sees_all in (True, False)}
    assert told[True] == "behind 3 answers in the engine: 2 of bob, 1 of alice; all rows were taken"
    assert told[False] == "behind 3 answers in the engine: 1 of your own; all rows were taken"
