"""A step on the host: which rows compute how many tokens, into which blocks, and what they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from penstock.cache.store import Transfer
from penstock.types import Request, TokenLogprobs


class Output(Enum):
    NONE = "none"  # part of a prompt: nothing comes back
    SAMPLE = "sample"  # the next token after the row's last position
    POOL = "pool"  # one embedding of the whole row


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft token and the index of the draft token it follows; -1 follows the last known token."""

    token: int
    parent: int
    chance: float = field(default=0.5, compare=False)  # of acceptance, given that its parent is right
    drafter: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one block to another before the step."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Admission:
    """Give a row to a sequence: its known tokens and its parameters."""

    row: int
    request: Request
    sibling: int
    tokens: tuple[int, ...]  # the prompt, request.tokens, and what was generated before
    mu: float | None = None  # mirostat's after those, where some were generated
    adapter: int = -1  # slot of request.loras


@dataclass(slots=True)
class Row:
    """The work of one sequence in this step: positions [start, start + count). It is never changed.

    `start` is exact unless an earlier, unfinished plan verifies drafts of the same row; then it is an
    upper bound, and the device's own count holds.
    """

    row: int
    start: int
    count: int
    output: Output
    blocks: tuple[dict[int, int], ...] = ()  # per group, if any: the new block at an index of the row's table
    tokens: tuple[int, ...] = ()  # chosen by the host (beams), appended to the row before the step
    draft: tuple[Draft, ...] = ()  # the last len(draft) of the count positions
    prompt_logprobs: bool = False  # log probabilities of the prompt tokens after each of these positions


@dataclass(frozen=True, slots=True)
class Plan:
    number: int
    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    moves: tuple[Move, ...] = ()  # in order, all before the step
    min_chance: float | None = None  # of draft tokens that are wanted back; None: no drafts
    ahead: int = 0  # draft tokens of each row that a drafting model is to make; 0: it rests
    draft_price: float = 0.0  # tokens that its draft of a row must promise beyond a text's
    loads: tuple[Transfer, ...] = ()  # from the store, before the moves; if one fails, nothing else is done
    saves: tuple[Transfer, ...] = ()  # to the store, before the step; they may fail

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(slots=True)
class RowResult:
    """The result of one row of the plan, in the plan's order."""

    tokens: tuple[int, ...] = ()  # sampled; with drafts: the accepted ones and one more
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token where the request asked
    candidates: tuple[tuple[int, float], ...] = ()  # beams: (token, log probability), likeliest first
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for prompt tokens start+1 … start+count
    embedding: tuple[float, ...] | None = None
    draft: tuple[Draft, ...] = ()  # for the row's next step
    error: str | None = None  # this row alone failed
    unfit: bool = False  # by the request's own fault
    complete: bool = False  # after the last token the answer is all that its grammar allows
    forced: bool = False  # a token was chosen to end the answer within its budget
    mu: float | None = None  # mirostat's after the last token

    @property
    def only_token(self) -> int | None:
        """The token, if the result carries nothing else but its log probabilities."""
        if (
            len(self.tokens) != 1
            or self.error is not None
            or self.prompt_logprobs
            or self.draft
            or self.complete
            or self.forced
            or self.mu is not None
        ):
            return None
        return self.tokens[0]


@dataclass(slots=True)
class Result:
    number: int
    rows: Sequence[RowResult | int] = ()  # a number: one sampled token and nothing else
    error: str | None = None  # the whole step failed; no row has a result
    forward_s: float = 0.0
    sampling_s: float = 0.0
    step_s: float = 0.0  # all that the device took
    draft_s: float = 0.0  # that a drafting model took after that
    idle_s: float = 0.0  # that it had waited for this plan, after the one before
    lost: bool = False  # a block to be loaded was not in the store: there was no step, and no row has a result
