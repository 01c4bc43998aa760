"""The rows of a decode step, from one step to the next, and the prefixes that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from penstock.engine.plan import Row, RowResult
from penstock.ops.attention.inputs import NUM_COMMON
from penstock.ops.sampling.report import LIST_END
from penstock.ops.sampling.row_params import MAX_LOGPROBS
from penstock.ops.sampling.sample import BAD
from penstock.ops.triton.tuning import MAX_PREFIXES, MIN_PREFIX_POSITIONS, MIN_PREFIX_SEQUENCES
from penstock.runner.rows import RunningRow
from penstock.sampling.row import Chooser, RowState
from penstock.sampling.sampler import describe_nothing_allowed
from penstock.sampling.topk import DAMAGED
from penstock.types import Logprob, TokenLogprobs


@dataclass(frozen=True)
class SharedPrefix:
    """Sequences of a step whose first `num_positions` lie in the same blocks."""

    members: tuple[int, ...]  # places in the step
    num_positions: int


class PrefixFinder:
    """Keeps what it found for the next step of the same rows: blocks are only added to them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._key: tuple[object, ...] = ()
        self._prefixes: list[SharedPrefix] = []

    def find(self, starts: Sequence[int], devices: Sequence[RunningRow]) -> list[SharedPrefix]:
        """Find the shared prefixes of a decode step whose rows are at `starts`, in a cache of one group."""
        if len(starts) < MIN_PREFIX_SEQUENCES:
            return []
        key = tuple(devices)
        if key != self._key:
            self._key, self._prefixes = key, self._search(starts, devices)
        return self._prefixes

    def _search(self, starts: Sequence[int], devices: Sequence[RunningRow]) -> list[SharedPrefix]:
        by_first: dict[int, list[int]] = {}
        for s, (start, device) in enumerate(zip(starts, devices)):
            if start >= MIN_PREFIX_POSITIONS:
                by_first.setdefault(device.tables[0].item(0), []).append(s)
        prefixes: list[SharedPrefix] = []
        for members in by_first.values():
            if len(members) >= MIN_PREFIX_SEQUENCES and len(prefixes) < MAX_PREFIXES:
                shortest = min(starts[s] for s in members) // self._block_size
                tables = np.stack([devices[s].tables[0][:shortest] for s in members])
                differing = np.flatnonzero((tables != tables[0]).any(axis=0))
                common = int(differing[0] if len(differing) else shortest) * self._block_size
                if common >= MIN_PREFIX_POSITIONS:
                    prefixes.append(SharedPrefix(tuple(members), common))
        return prefixes


def fill_shared(
    prefixes: Sequence[SharedPrefix], tile_tokens: int, members: np.ndarray, skips: np.ndarray, tiles: np.ndarray
) -> None:
    """Fill in members, one prefix after the other, the positions each sequence skips, and tiles [n, 4]: first member,
    number of members, the one whose block table is read, number of positions."""
    skips[:], tiles[:], members[:] = 0, 0, 0
    first = tile = 0
    for prefix in prefixes:
        count = len(prefix.members)
        members[first : first + count] = prefix.members
        skips[list(prefix.members)] = prefix.num_positions
        for begin in range(0, count, tile_tokens):
            tiles[tile] = first + begin, min(tile_tokens, count - begin), prefix.members[0], prefix.num_positions
            tile += 1
        first += count


def max_tiles(num_sequences: int, tile_tokens: int) -> int:
    """Tiles of any step of so many sequences, at most."""
    return -(-num_sequences // tile_tokens) + MAX_PREFIXES


Value = TypeVar("Value")


class DecodeBatch:
    """A plan's rows in the order of their step, the longest first: the last one computed runs beside little else.
    While the same rows continue by one token each, only their positions change."""

    def __init__(
        self, numbers: np.ndarray, devices: Sequence[RunningRow], starts: np.ndarray, num_rows: int, num_admitted: int
    ) -> None:
        """Rows in the plan's order; while `num_admitted` stays, no row has been given to another sequence."""
        order = np.argsort(-starts, kind="stable")
        self.numbers, self.starts, self._num_admitted = numbers[order], starts[order], num_admitted
        self.devices = [devices[index] for index in order.tolist()]
        self.is_simple = all(device.state.chooser <= Chooser.DEVICE for device in devices)
        self.is_steady = self.is_simple or all(device.state.is_steady for device in devices)
        self.num_logprobs = [device.state.num_logprobs for device in self.devices]
        self.max_logprobs = max((count for count in self.num_logprobs if count is not None), default=None)
        self.prefixes: list[SharedPrefix] = []
        self._tokens = [device.state.tokens for device in self.devices]
        self._places = np.full(num_rows, -1)  # of each row in the step
        self._places[self.numbers] = np.arange(len(order))

    def advance(self, numbers: np.ndarray, starts: np.ndarray, num_admitted: int) -> bool:
        """Move to the next positions if a plan has the same rows, each one token on; False, unchanged, if not."""
        places = self._places[numbers]
        if num_admitted != self._num_admitted or len(places) != len(self.numbers) or places.min() < 0:
            return False
        in_order = np.empty_like(starts)
        in_order[places] = starts
        if (in_order - self.starts != 1).any():
            return False
        self.starts = in_order
        return True

    def places(self, numbers: np.ndarray) -> list[int]:
        """The places of a plan's rows in the step."""
        found: list[int] = self._places[numbers].tolist()
        return found

    def tokens(self) -> list[int]:
        """The tokens at the rows' positions; -1 for one that only the device knows yet."""
        return [known[start] if start < len(known) else -1 for start, known in zip(self.starts.tolist(), self._tokens)]

    def append(
        self, tokens: Sequence[int], places: Sequence[int], report: Report | None = None
    ) -> list[RowResult | int]:
        """Append a step's tokens, in its order, to steady rows; returns the results of the rows at `places`."""
        if not self.is_simple:
            outcomes = [self._append(place, token, report) for place, token in enumerate(tokens)]
            return [outcomes[place] for place in places]
        results: list[RowResult | int] = [tokens[place] for place in places]
        if BAD in tokens:
            results = [RowResult(error=DAMAGED) if token == BAD else token for token in results]
        for known, token in zip(self._tokens, tokens):
            if token != BAD:
                known.append(token)
        return results

    def _append(self, place: int, token: int, report: Report | None) -> RowResult | int:
        """Append one row's token."""
        if token < 0:
            return describe_failure(token, self.devices[place].state)
        self._tokens[place].append(token)
        count = self.num_logprobs[place]
        if count is None or report is None:
            return token
        return RowResult((token,), (report.read(place, token, count),))


def describe_failure(token: int, state: RowState) -> RowResult:
    """The result of a row whose token is BAD or NOTHING."""
    if token == BAD:
        return RowResult(error=DAMAGED)
    return RowResult(error=describe_nothing_allowed(state), unfit=True)


class Report:
    """Log probabilities of a step's rows, as `ops.report` has them."""

    def __init__(self, lines: torch.Tensor, most: int) -> None:
        """Read `lines`, in which a row lists `most` tokens or fewer."""
        numbers = lines.numpy()
        self._chosen: list[tuple[float, float]] = numbers[:, :2].tolist()
        self._ids: list[list[int]] = numbers[:, 2 : 2 + most].astype(np.int64).tolist()
        self._values: list[list[float]] = numbers[:, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + most].tolist()

    def read(self, place: int, token: int, count: int) -> TokenLogprobs:
        """The sampled token first, then the likeliest `count`."""
        logprob, rank = self._chosen[place]
        chosen = Logprob(logprob, int(rank))
        found = {token: chosen}
        found.update(zip(self._ids[place][:count], map(_make_logprob, zip(self._values[place], RANKS, NO_TEXTS))))
        found[token] = chosen
        found.pop(LIST_END, None)
        return found


_make_logprob = Logprob._make
RANKS = range(1, MAX_LOGPROBS + 1)
NO_TEXTS = (None,) * MAX_LOGPROBS


def put_in_order(values: Sequence[Value], places: Sequence[int]) -> list[Value]:
    """Values sorted by their places."""
    return [value for _, value in sorted(zip(places, values), key=lambda pair: pair[0])]


def enter_blocks(rows: Sequence[Row], places: Sequence[int], numbers: np.ndarray) -> bool:
    """Write one new block of each row and group to its place in `numbers`; True if a row has more."""
    several = False
    for row, place in zip(rows, places):
        if row.blocks:
            for g, changes in enumerate(row.blocks):
                if changes:
                    first = NUM_COMMON + 2 * g
                    numbers[first : first + 2, place] = next(reversed(changes.items()))
                    several |= len(changes) > 1
    return several
