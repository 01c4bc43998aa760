"""What the simulated device keeps: block memory, and a row per running sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from penstock.engine.plan import Plan, Result, Row
from penstock.types import Request
from tests.simulation.model import Chain

NOTHING = -1
GARBAGE = -7


class Broken(AssertionError):
    """The core asked the device for something that must never happen."""


def require(ok: bool, what: str, *where: object) -> None:
    if not ok:
        raise Broken(f"{what}: {', '.join(map(repr, where))}")


class Memory:
    """One list of cells per block. A block given to a new owner still has the old contents, as on a real device."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cells = [[NOTHING] * block_size for _ in range(num_blocks)]

    def copy(self, source: int, target: int) -> None:
        self.cells[target] = list(self.cells[source])

    def spoil(self, block: int) -> None:
        self.cells[block] = [GARBAGE] * self.block_size

    def read(self, table: Seq[int], start: int, end: int) -> Chain:
        """The values of positions [start, end)."""
        size = self.block_size
        first = start // size
        values: Chain = []
        for index in range(first, -(-end // size)):
            require(index < len(table) and table[index] >= 0, "a position without a block is read", index, table)
            values += self.cells[table[index]]
        return values[start - first * size : end - first * size]

    def write(self, table: Seq[int], start: int, values: Chain) -> None:
        size = self.block_size
        for position, value in enumerate(values, start):
            index = position // size
            require(index < len(table) and table[index] >= 0, "a position without a block is written", index, table)
            self.cells[table[index]][position % size] = value

    def read_state(self, blocks: Seq[int]) -> int:
        """A recurrent state fills its blocks with one value; each block is offset by its place."""
        values = {self.cells[block][0] - place for place, block in enumerate(blocks)}
        require(len(values) == 1, "a state is torn", blocks)
        return values.pop()

    def write_state(self, blocks: Seq[int], value: int) -> None:
        for place, block in enumerate(blocks):
            self.cells[block] = [value + place] * self.block_size


@dataclass(eq=False)
class DeviceRow:
    """One stay of a sequence on a row, from its admission on."""

    request: Request
    sibling: int
    tokens: list[int]
    tables: list[list[int]]  # as the plans started so far say
    computed: int  # by the plans that have run
    chain: Chain = field(default_factory=list)
    broken: bool = False  # a step failed under it: what it does until it is admitted anew is void
    num_drafting: int = 0  # guesses of it that unfinished plans verify

    @property
    def name(self) -> tuple[str, int]:
        return self.request.id, self.sibling


@dataclass(eq=False)
class Task:
    """One row of a started plan, with its tables as they were then."""

    row: Row
    device: DeviceRow
    tables: list[list[int]]
    exact: bool  # row.start is where the row stands, not an upper bound of it
    first: int  # the first position that it may write


@dataclass(eq=False)
class Work:
    plan: Plan
    tasks: list[Task]
    beside: frozenset[int] = frozenset()  # plans that had not ended when this one was started, and it
    result: Result | None = None


@dataclass
class Tally:
    """What the device did."""

    num_computed: int = 0
    num_recomputed: int = 0  # positions computed again by the same sequence
    num_moves: int = 0
    num_failed_steps: int = 0
    num_failed_rows: int = 0
    num_void: int = 0  # rows that ran although their last step had failed
    num_rejected: int = 0  # guesses
    num_trees: int = 0  # drafts that were no line
    num_path_moves: int = 0  # positions of accepted paths that did not lie in order
    num_lost: int = 0  # plans that were not run, as a block to be loaded was lost
