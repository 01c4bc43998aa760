"""One answer in the making: its tokens, how many are computed, and its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from penstock.cache.holding import Holding
from penstock.cache.radix import Root
from penstock.engine.plan import Draft
from penstock.types import Request, TokenLogprobs
from penstock.types.speculation import count_most

if TYPE_CHECKING:
    from penstock.engine.scheduling.beam import BeamGroup


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class InFlight:
    """One unfinished plan's share of a sequence."""

    count: int
    expected: int  # tokens that may come back, at most


@dataclass(slots=True, eq=False)
class Sequence:
    """`computed` is advanced by `schedule`, before the device is done, and corrected by `commit`."""

    request: Request
    number: int  # order of arrival
    sibling: int = 0
    tokens: list[int] = field(default_factory=list)
    draft: list[Draft] = field(default_factory=list)
    mu: float | None = None  # mirostat's after the tokens
    computed: int = 0
    status: Status = Status.WAITING
    holding: Holding | None = None
    row: int = -1
    adapter: int = -1  # slot of its adapters
    admitted: bool = False  # the device knows the row's tokens and parameters
    chosen: list[int] = field(default_factory=list)  # tokens picked by the host that the device has not been told of
    flights: list[InFlight] = field(default_factory=list)
    epoch: int = 0  # results of plans started in an earlier epoch are void
    leader: Sequence | None = None  # the sibling whose prompt this one shares
    beam: BeamGroup | None = None
    score: float = 0.0  # beams: summed log probability
    candidates: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int | None = None  # prompt tokens found in the cache when first admitted
    num_preempted: int = 0
    passed: int = 0  # how often a later arrival was admitted first
    overtaken: int = 0  # the same, while it waited for a slot for its adapters
    num_blocked: int = 0  # the journal's count when it began to wait
    suspect: int = 0  # a step with it failed: it runs alone until so much is settled
    keys: list[int] = field(default_factory=list)  # of its prompt's blocks; others may wait for them
    awaits: int | None = None  # the key that it waits for, or waited
    num_prompt: int = field(init=False)
    root: Root = field(init=False)  # of its prefixes in the cache
    limit: int = field(init=False)  # tokens that the sequence can have
    stops: frozenset[int] = field(init=False)  # ids that may end it
    max_drafts: int = field(init=False)  # draft tokens of a step that the request takes
    special: bool = field(init=False)  # a beam, pooled, handed over, or with log probabilities of its prompt

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.tokens)
        self.root = Root(self.request.salt, self.request.num_public, self.request.lora_key)
        self.limit = self.num_prompt + (0 if self.request.pool else self.request.max_tokens)
        self.stops = frozenset(self.request.stop_token_ids)
        self.max_drafts = count_most(self.request.sampling.speculation)
        asked = self.request.sampling.prompt_logprobs is not None
        self.special = self.request.pool or bool(self.request.beam) or asked or self.request.hand_over

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def expected(self) -> int:
        """Tokens that unfinished plans may still append, at most."""
        total = 0  # a loop: twice as fast as sum, and every row asks at each block's end
        for flight in self.flights:
            total += flight.expected
        return total

    @property
    def verifies(self) -> bool:
        """True if an unfinished plan verifies drafts of it."""
        return any(flight.expected > 1 for flight in self.flights)

    @property
    def settled(self) -> int:
        """Positions whose state is certainly in the cache: no unfinished plan's share is counted."""
        position = self.computed
        for flight in self.flights:
            position -= flight.count
        return position

    @property
    def certain(self) -> int:
        """The first position that the next plan may write: before it, unfinished plans leave nothing open."""
        position = self.computed
        for flight in self.flights:
            if flight.expected > 1:
                position -= flight.expected - 1
        return position

    @property
    def remaining(self) -> int:
        """Positions of known or coming tokens that no plan computes yet: one for decoding, many for a prompt."""
        return len(self.tokens) + self.expected - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if prompt log probabilities are owed, so that the prompt must be computed, not read from the cache."""
        if self.request.sampling.prompt_logprobs is None or self.request.beam or self.sibling:
            return False
        return len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def done(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def held(self) -> Holding:
        if self.holding is None:
            raise RuntimeError(f"sequence {self.number} holds no blocks")
        return self.holding

    def rewind(self) -> None:
        """Drop all state but the tokens: everything else is computed again."""
        self.computed = 0
        self.flights.clear()
        self.draft.clear()
        self.chosen.clear()
        self.holding = None
        self.row = -1
        self.admitted = False
        self.epoch += 1

    def check(self) -> None:
        if not 0 <= self.settled <= self.certain <= self.computed <= len(self.tokens) + self.expected:
            raise AssertionError(f"sequence {self.number}: computed={self.computed} is out of bounds")
        if self.settled > len(self.tokens):
            raise AssertionError(f"sequence {self.number}: more is settled than is known")
        runs = self.status is Status.RUNNING
        if (self.holding is not None) != runs or (self.row >= 0) != runs:
            raise AssertionError(f"sequence {self.number}: {self.status} with row {self.row}")
        if self.draft and not runs:
            raise AssertionError(f"sequence {self.number}: {self.status} with a draft of before")
        if len(self.tokens) > self.limit:
            raise AssertionError(f"sequence {self.number}: {len(self.tokens)} tokens, the limit is {self.limit}")
