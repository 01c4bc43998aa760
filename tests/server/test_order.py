"""--scheduling-policy behind the server: which of a tenant's waiting requests its queue lets go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import pytest

from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.prefixes import BLOCK_TOKENS, MIN_KNOWN_TOKENS
from penstock.server.engines.queues import MAX_PASSES, LongestPrefixOrder, PromptQueue
from penstock.types import Request


def flight(name: str, tokens: Sequence[int], *, tenant: str = "", salt: str = "", priority: int = 0) -> InFlightRequest:
    return InFlightRequest(
        Request(id=name, tokens=tuple(tokens), salt=salt, priority=priority), None, None, tenant=tenant
    )


def taken(admission: AdmissionQueue) -> list[str]:
    names = []
    while (peeked := admission.peek()) is not None:
        assert admission.next() is peeked
        names.append(peeked.request.id)
    return names


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ("fcfs", ["long", "short", "middle"]),
        ("priority", ["long", "short", "middle"]),
        ("sjf", ["short", "middle", "long"]),
    ],
)
def test_the_shortest_goes_first_where_that_is_asked_for(policy: str, names: list[str]) -> None:
    admission = AdmissionQueue(100, 10_000, policy=policy)
    for name, count in (("long", 90), ("short", 3), ("middle", 30)):
        admission.enter(flight(name, range(count)))
    assert taken(admission) == names


def test_who_was_overtaken_often_goes() -> None:
    admission = AdmissionQueue(100, 10_000, policy="sjf")
    admission.enter(flight("long", range(500)))
    for number in range(MAX_PASSES + 4):
        admission.enter(flight(f"{number}", range(5)))
    assert taken(admission).index("long") == MAX_PASSES


def test_a_better_priority_and_another_tenant_come_before_a_shorter_prompt() -> None:
    admission = AdmissionQueue(100, 10_000, {"a": 1.0, "b": 1.0}, policy="sjf")
    admission.enter(flight("urgent", range(50), tenant="a", priority=-1))
    admission.enter(flight("short", range(2), tenant="a"))
    admission.enter(flight("other", range(400), tenant="b"))
    assert taken(admission) == ["urgent", "other", "short"]


def test_prompts_of_one_beginning_go_together() -> None:
    beginnings = {name: [ord(name)] * (4 * BLOCK_TOKENS) for name in "xyz"}
    admission = AdmissionQueue(100, 100_000, policy="lpm")
    for number in range(3):
        for name, tokens in beginnings.items():
            admission.enter(flight(f"{name}{number}", [*tokens, number]))
    assert taken(admission) == [f"{name}{number}" for name in "xyz" for number in range(3)]


def test_a_prefix_counts_within_its_salt_and_until_the_engine_is_new() -> None:
    tokens = range(3 * BLOCK_TOKENS)
    for salts, is_forgotten, names in (
        (("s", "s"), False, ["same", "new"]),
        (("s", "t"), False, ["new", "same"]),
        (("s", "s"), True, ["new", "same"]),
    ):
        admission = AdmissionQueue(100, 10_000, policy="lpm")
        admission.enter(flight("first", tokens, salt=salts[0]))
        assert admission.next() is not None
        if is_forgotten:
            admission.order.reset(1 << 20)
        admission.enter(flight("new", [7] * 100))
        admission.enter(flight("same", tokens, salt=salts[1]))
        assert taken(admission) == names


def test_as_many_blocks_are_remembered_as_the_cache_has() -> None:
    admission = AdmissionQueue(10_000, 10_000_000, policy="lpm")
    admission.order.reset(8192)
    admission.enter(flight("old", [1] * 160))
    admission.next()
    for number in range(8192 // 160 + 1):
        admission.enter(flight(f"{number}", [number + 2] * 160))
    taken(admission)
    admission.enter(flight("new", [9_999] * 160))
    admission.enter(flight("again", [1] * 160))
    assert taken(admission) == ["new", "again"]


def test_one_that_is_entitled_to_a_row_is_not_overtaken() -> None:
    admission = AdmissionQueue(100, 10_000, policy="sjf")
    entitled = flight("entitled", range(300))
    admission.enter(entitled)
    admission.enter(flight("short", range(3)))
    admission.promote(entitled)
    assert taken(admission) == ["entitled", "short"]


def test_a_long_prompt_is_forgotten_from_its_end_and_compared_in_few_looks() -> None:
    class Counted(OrderedDict[Hashable, int]):
        num_looks = 0

        def __contains__(self, key: object) -> bool:
            self.num_looks += 1
            return super().__contains__(key)

    order, tokens = LongestPrefixOrder(), list(range(2 * MIN_KNOWN_TOKENS))
    queue = PromptQueue([flight("long", tokens)])
    order.record_start(queue, [queue])
    order._known._known = known = Counted(order._known._known)
    assert order.cost(flight("again", tokens)) == -(MIN_KNOWN_TOKENS // BLOCK_TOKENS)
    assert known.num_looks < 20
