"""The scheduler as a state machine: whatever is asked in whatever order, every answer is the model's own."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.cache.group import Group
from penstock.config import CAPACITIES, POLICIES
from penstock.errors import InvalidRequest
from penstock.types import BeamSearchParams, Request
from tests.engine.stage import FULL, STATE, Stage, window
from tests.simulation.effort import effort
from tests.simulation.faults import Faults
from tests.simulation.forward import Drafting

GROUPS = [
    (FULL,),
    (window(3),),
    (STATE,),
    (FULL, window(6)),
    (FULL, STATE),
    (window(6), STATE),
    (FULL, window(6), STATE),
]
TEXT = [7, 7, 7, 8, 7, 7, 8, 8, 9, 9, 9, 9, 7, 7, 7, 7]


class SchedulerMachine(RuleBasedStateMachine):
    stage: Stage

    @initialize(
        groups=st.sampled_from(GROUPS),
        num_blocks=st.integers(12, 40),
        block_size=st.integers(1, 5),
        seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 4, 9, 40]),
        policy=st.sampled_from(POLICIES),
        capacity=st.sampled_from(CAPACITIES),
        caching=st.booleans(),
        overlap=st.integers(0, 3),
        lazy=st.booleans(),
        draft=st.sampled_from([0.0, 0.8]),
    )
    def setup(
        self,
        groups: tuple[Group, ...],
        num_blocks: int,
        block_size: int,
        seqs: int,
        budget: int,
        policy: str,
        capacity: str,
        caching: bool,
        overlap: int,
        lazy: bool,
        draft: float,
    ) -> None:
        self.stage = Stage(
            *groups,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=seqs,
            policy=policy,
            max_num_batched_tokens=budget,
            capacity=capacity,
            caching=caching,
            overlap=overlap,
            lazy=lazy,
            drafting=Drafting(draft, 6, 0.7),
            faults=Faults(),
        )
        self.live: list[Request] = []

    @rule(
        length=st.integers(1, 16),
        own=st.booleans(),
        max_tokens=st.integers(1, 10),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "a"]),
        kind=st.sampled_from(["", "", "n", "beam", "pool", "prompt"]),
        poison=st.integers(0, 9),
    )
    def add(self, length: int, own: bool, max_tokens: int, priority: int, salt: str, kind: str, poison: int) -> None:
        options: dict[str, Any] = {"priority": priority, "salt": salt, "eos_token_ids": (0, 1, 2)}
        if kind == "beam":
            options["beam"] = BeamSearchParams(beam_width=3, max_tokens=max_tokens)
        kinds: dict[str, dict[str, Any]] = {"n": {"n": 3}, "pool": {"pool": True}, "prompt": {"prompt_logprobs": 0}}
        options.update(kinds.get(kind, {}))
        prompt: int | list[int] = length if own else TEXT[:length]
        needed = self.stage.cache.blocks_to(
            length if kind == "pool" else length + max_tokens, length if kind == "pool" else 1
        )
        fits = needed <= self.stage.cache.pool.num_blocks and not (
            kind == "pool" and length > self.stage.scheduler.max_num_batched_tokens
        )
        try:
            request = self.stage.add(prompt, max_tokens, **options)
        except InvalidRequest:
            assert not fits
            return
        assert fits
        self.live.append(request)
        if not poison:
            self.stage.device.faults.poison.add(request.id)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), sibling=st.sampled_from([None, None, 0, 1]))
    def abort(self, data: st.DataObject, sibling: int | None) -> None:
        self.stage.abort(data.draw(st.sampled_from(self.live)), sibling)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        self.stage.step(times)

    @rule()
    def fail_the_next_step(self) -> None:
        faults = self.stage.device.faults
        faults.step_rate = 0.0 if faults.step_rate else 0.2

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        self.stage.device.faults.step_rate = 0.0
        self.stage.run(20_000)
        blamed = {name for name, _ in self.stage.device.blamed}
        errors = {delta.request_id for delta in self.stage.deltas if delta.finish_reason == "error"}
        assert errors <= blamed
        poison = self.stage.device.faults.poison
        assert not any(delta.tokens for delta in self.stage.deltas if delta.request_id in poison)
        self.stage.cache.tree.clear()
        assert self.stage.cache.pool.num_free == self.stage.cache.pool.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = effort(90, steps=30)
