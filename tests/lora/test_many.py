"""Many adapters and few slots: those at hand go first, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.executor import Answer, Awaited, Done, DropLora, LoadLora
from penstock.engine.messages import Add
from penstock.engine.scheduling.waiting import MAX_OVERTAKEN
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.dispatcher import Dispatcher
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.replica import MAX_AHEAD, MAX_SLOTLESS
from penstock.types import Delta, LoraUse, Request
from tests.engine.stage import Stage

BYTES = 100  # of an adapter with an even number; others have twice as many
numbers = count()


class Disk:
    """Reads adapters, each for some polls, and notes which are in memory."""

    def __init__(self, num_polls: int) -> None:
        self.num_polls = num_polls
        self.held: set[int] = set()
        self.most = 0  # bytes at once

    def tell(self, message: object) -> Awaited[Answer]:
        if isinstance(message, LoadLora):
            return Reading(self, message.number)
        if isinstance(message, DropLora):
            self.held.discard(message.number)
        return Done(Answer())

    def add(self, number: int) -> Answer:
        self.held.add(number)
        self.most = max(self.most, sum(map(size_of, self.held)))
        return Answer({"fingerprint": "f", "num_bytes": size_of(number)})


class Reading:
    def __init__(self, disk: Disk, number: int) -> None:
        self.disk, self.number, self.polls = disk, number, 0

    @property
    def is_done(self) -> bool:
        self.polls += 1
        return self.polls > self.disk.num_polls

    def result(self) -> Answer:
        return self.disk.add(self.number)


def size_of(number: int) -> int:
    return BYTES * (1 + number % 2)


def make(num_slots: int, num_loras: int, num_polls: int = 0, policy: str = "fcfs", **memory: Any) -> tuple[Stage, Disk]:
    stage, disk = Stage(max_num_seqs=8, policy=policy), Disk(num_polls)
    stage.scheduler.enable_loras(num_slots, **{"num_resident": num_loras, **memory})
    stage.engine.loras.connect(disk.tell)
    for number in range(num_loras):
        stage.engine.loras.load(LoadLora(number, "", "f"))
    return stage, disk


def send(stage: Stage, loras: tuple[int, ...], max_tokens: int = 4, **more: Any) -> str:
    id = f"r{next(numbers)}"
    uses = tuple(LoraUse(str(number), number) for number in loras)
    stage.scheduler.add(Request(id=id, tokens=(1, 2, 3), max_tokens=max_tokens, loras=uses, **more))
    return id


def run(stage: Stage, until: Callable[[list[str]], bool], each: Callable[[], Any] = lambda: None) -> list[str]:
    """Step until a condition on the requests that ended."""
    ended: list[str] = []
    for _ in range(3000):
        if until(ended):
            return ended
        each()
        ended += [delta.request_id for delta in stage.engine.step() if delta.finish_reason]
        stage.scheduler.check()
    raise AssertionError("requests wait for ever")


def test_requests_at_hand_go_first_and_fill_the_rows() -> None:
    """Taken in turn, eight adapters would change slots all the time."""
    stage, _ = make(2, 8)
    sent = [send(stage, (number % 8,)) for number in range(64)]
    ended = run(stage, lambda ended: len(ended) == 64)
    assert sorted(ended) == sorted(sent)
    assert stage.scheduler.stats.num_steps < 40, "rows were left free"  # 32 are enough for 8 rows


def wait_beside(policy: str = "fcfs", **more: Any) -> int:
    """Count the requests that end before one whose slot others have. Their two adapters have requests without end."""
    stage, _ = make(2, 3, policy=policy)
    num_sent = 0

    def go_on() -> None:
        nonlocal num_sent
        while len(stage.scheduler.roster.waiting) < 16:
            send(stage, (num_sent % 2,), 3 + num_sent * 7 % 11)
            num_sent += 1

    for _ in range(3):
        go_on()
        stage.engine.step()
    patient = send(stage, (2,), **more)
    return len(run(stage, lambda ended: patient in ended, go_on))


def test_nobody_is_overtaken_for_ever() -> None:
    assert 16 + MAX_OVERTAKEN / 2 < wait_beside() < 16 + MAX_OVERTAKEN + 24


def test_a_better_priority_and_another_tenant_wait_less() -> None:
    assert wait_beside("priority", priority=-1) < 24
    assert wait_beside(tenant="other") < 32


def test_what_is_larger_than_the_memory_runs_alone() -> None:
    stage, disk = make(4, 6, num_resident=None, max_bytes=3 * BYTES)
    sent = [send(stage, loras) for loras in [(0,), (1, 3, 5), (2,), (1,), (0, 1, 2), (4,)] * 3]
    assert sorted(run(stage, lambda ended: len(ended) == len(sent))) == sorted(sent)
    assert disk.most <= 6 * BYTES


@given(
    num_slots=st.integers(1, 5),
    num_polls=st.integers(0, 4),
    max_bytes=st.integers(1, 12),
    by_count=st.booleans(),
    asked=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3, unique=True),
            st.integers(1, 12),
            st.sampled_from(["", "a", "b"]),
            st.integers(-1, 1),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=40,
    ),
)
@settings(max_examples=60, deadline=None)
def test_everyone_ends_and_memory_is_kept(
    num_slots: int, num_polls: int, max_bytes: int, by_count: bool, asked: list[Any]
) -> None:
    memory = dict(num_resident=3) if by_count else dict(num_resident=None, max_bytes=max_bytes * BYTES)
    stage, disk = make(num_slots, 10, num_polls, **memory)
    later, sent = list(asked), []

    def arrive() -> None:
        """Some come at once, and some after steps."""
        while later:
            loras, max_tokens, tenant, priority, wait = later[0]
            if wait:
                later[0] = (loras, max_tokens, tenant, priority, wait - 1)
                return
            sent.append(send(stage, tuple(loras), max_tokens, tenant=tenant, priority=priority))
            later.pop(0)

    def step() -> None:
        arrive()
        if not stage.engine.has_work:
            while later and not stage.engine.has_work:
                arrive()

    ended = run(stage, lambda ended: not later and len(ended) == len(sent), step)
    assert sorted(ended) == sorted(sent)
    if by_count:
        assert len(disk.held) <= 3
    else:
        largest = max((sum(map(size_of, loras)) for loras, *_ in asked), default=0)
        assert disk.most <= max(max_bytes * BYTES, largest) + 2 * BYTES * 2  # sizes are estimates until they are read


def flight(lora: int | None, tenant: str = "") -> InFlightRequest:
    loras = () if lora is None else (LoraUse(str(lora), lora),)
    return InFlightRequest(
        Request(id=f"r{next(numbers)}", tokens=(1, 2), max_tokens=4, loras=loras, tenant=tenant), None, None,
        tenant=tenant,
    )  # fmt: skip


def make_dispatcher() -> tuple[Dispatcher, list[Any]]:
    """Make a dispatcher of an engine with 8 rows and two slots, which says nothing."""
    sent: list[Any] = []
    dispatcher = Dispatcher(AdmissionQueue(10_000, 1_000_000))
    replica = dispatcher.replicas.add(sent.append)
    replica.num_slots = 2
    dispatcher.open(replica, 8)
    return dispatcher, sent


def test_requests_that_wait_for_a_slot_keep_no_others_from_free_rows() -> None:
    dispatcher, sent = make_dispatcher()
    adapted = [flight(number) for number in range(30)]
    plain = [flight(None) for _ in range(6)]
    dispatcher.submit(*adapted)
    dispatcher.submit(*plain)
    ids = [message.request.id for message in sent if isinstance(message, Add)]
    assert {one.request.id for one in plain} <= set(ids)
    dispatcher.submit(*(flight(None) for _ in range(20)))
    num_sent = sum(isinstance(message, Add) for message in sent)
    assert num_sent == 28 + 8 + MAX_AHEAD  # 28 wait for slots; two with adapters and six without have the rows
    for number in (7, 9, 11):  # others have the slots, and one had
        dispatcher.handle_deltas([Delta(adapted[number].request.id, 0, (5,))])
    assert dispatcher.replicas.most_parts == 8 + 28
    dispatcher.abort(*adapted)
    assert dispatcher.replicas.most_parts == 8


def test_few_requests_are_sent_ahead_for_slots() -> None:
    dispatcher, sent = make_dispatcher()
    dispatcher.submit(*(flight(number) for number in range(1000)))
    assert len(sent) == 8 + MAX_AHEAD + MAX_SLOTLESS
    other = flight(2000, "other")
    dispatcher.submit(other)
    assert other.request.id in [one.request.id for one in sent if isinstance(one, Add)]
    assert dispatcher.parts.num_rows == 8 + MAX_AHEAD + MAX_SLOTLESS
