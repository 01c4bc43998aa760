"""One row of one step on the simulated device: write its positions, read back what they see, answer from that."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from penstock.cache.kv import KVCache
from penstock.engine.draft_tree import find_moves, find_paths
from penstock.engine.plan import Draft, Output, Plan, Row, RowResult
from tests.simulation.device import DeviceRow, Memory, Tally, Task, require
from tests.simulation.model import Chain, Model, chance, extend


@dataclass(frozen=True)
class Drafting:
    """How often the device guesses, how far, and how well."""

    rate: float = 0.0
    longest: int = 4
    accuracy: float = 0.7


def branch(line: Seq[Draft], seed: int) -> list[Draft]:
    """Hang wrong guesses beside those of a line: before them, after them, or both."""
    nodes: list[Draft] = []
    parent = -1
    for i, draft in enumerate(line):
        if chance(seed, i, 7) < 0.5:
            nodes.append(Draft(2, parent, chance(seed, i, 8)))
            if chance(seed, i, 9) < 0.3:
                nodes.append(Draft(3, len(nodes) - 1, chance(seed, i, 10)))
        nodes.append(Draft(draft.token, parent, chance(seed, i, 11)))
        if chance(seed, i, 12) < 0.3:
            nodes.append(Draft(4, parent, chance(seed, i, 13)))
        parent = next(j for j in range(len(nodes) - 1, -1, -1) if nodes[j].token == draft.token)
    return nodes


class Forward:
    """Every value read is compared with the prefix's own at once; unless `strict`, it only shows in the tokens."""

    def __init__(
        self, cache: KVCache, model: Model, memory: Memory, tally: Tally, drafting: Drafting, seed: int, strict: bool
    ) -> None:
        self.cache = cache
        self.model = model
        self.memory = memory
        self.tally = tally
        self.drafting = drafting
        self.seed = seed
        self.strict = strict
        self.reach: dict[tuple[str, int], int] = {}  # how far each sequence was ever computed

    def run(self, plan: Plan, task: Task) -> RowResult:
        row, device = task.row, task.device
        device.tokens.extend(row.tokens)
        start = device.computed
        require(start == row.start if task.exact else start <= row.start, "the row stands elsewhere", start, row)
        end, known, guesses = start + row.count, len(device.tokens), [draft.token for draft in row.draft]
        require(end <= known + len(guesses), "more positions than tokens", end, known, row)
        require(
            (row.output is Output.NONE) == (end < known) and (end <= known) == (not guesses),
            "a wrong kind of output",
            row,
            end,
            known,
        )
        require(row.output is not Output.POOL or row.count == len(device.request.tokens), "a pooled row in parts", row)
        extend(device.chain, device.tokens[len(device.chain) :], device.request.salt)
        values = list(device.chain)
        for draft in row.draft:  # by place: each follows its parent, wherever that lies
            path = [values[known + draft.parent] if draft.parent >= 0 else device.chain[-1]]
            extend(path, [draft.token], device.request.salt)
            values.append(path[-1])
        self._count(device, start, end)
        views = [self._forward(task, g, values, start, end) for g in range(len(self.cache.groups))]
        outcome = self._output(row, device, views, values, start, end)
        self._move_path(task, known, outcome)
        device.computed = end - len(guesses) + max(0, len(outcome.tokens) - 1)
        self.tally.num_rejected += len(guesses) - max(0, len(outcome.tokens) - 1)
        if outcome.tokens:
            device.tokens.extend(outcome.tokens)
            outcome.draft = self._guess(plan, device)
        return outcome

    def _forward(self, task: Task, g: int, values: Chain, start: int, end: int) -> tuple[int, Chain]:
        """Write one group's part of positions [start, end); the first position they see, and what is read back."""
        spec, table = self.cache.groups[g].spec, task.tables[g]
        if spec.kind == "recurrent":
            require(not task.row.draft, "a draft on a state that cannot go back", task.row)
            states = [self.memory.read_state(table)] if start else []
            self._compare(states, values[start - 1 : start] if start else [], task, g)
            extend(states, task.device.tokens[start:end], task.device.request.salt)
            self.memory.write_state(table, states[-1])
            return end - len(states), states
        first = spec.find_first_needed(start)
        self.memory.write(table, start, values[start:end])
        cells = self.memory.read(table, first, end)
        self._compare(cells, values[first:end], task, g)
        return first, cells

    def _compare(self, got: Chain, expected: Chain, task: Task, g: int) -> None:
        if self.strict and got != expected:
            wrong = next(i for i, pair in enumerate(zip(got, expected)) if pair[0] != pair[1])
            require(
                False,
                f"group {g} reads a wrong value, number {wrong} of {len(expected)}",
                task.device.name,
                task.row,
                task.tables[g],
            )

    def _move_path(self, task: Task, begin: int, outcome: RowResult) -> None:
        """Copy the cells of accepted guesses to the places that a line would have put them at."""
        moves = find_moves(task.row.draft, outcome.tokens)
        self.tally.num_path_moves += len(moves)
        for table in task.tables if moves else ():
            for source, target in moves:
                self.memory.write(table, begin + target, self.memory.read(table, begin + source, begin + source + 1))

    def _digest(self, views: list[tuple[int, Chain]], values: Chain, places: Seq[int]) -> int:
        """Join what each group reads at these places, one per position, of which the last is the query's own."""
        parts = []
        for (first, cells), group in zip(views, self.cache.groups):
            last = len(places) - 1
            low = last if group.spec.kind == "recurrent" else group.spec.find_first_needed(last)
            parts.append(hash(tuple(cells[place - first] for place in places[low:])))
        return self.model.join(parts or [values[places[-1]]])

    def _output(
        self, row: Row, device: DeviceRow, views: list[tuple[int, Chain]], values: Chain, start: int, end: int
    ) -> RowResult:
        request, outcome, begin = device.request, RowResult(), end - len(row.draft)
        seen = {begin + path[-1]: [*range(begin), *(begin + i for i in path)] for path in find_paths(row.draft)}
        digests = {
            q: self._digest(views, values, seen.get(q) or range(q + 1)) for q in self._wanted(row, device, start, end)
        }
        if row.prompt_logprobs:
            outcome.prompt_logprobs = tuple(
                self.model.described(digests[q], request.tokens[q + 1])
                for q in range(start, min(end, len(request.tokens) - 1))
            )
        if row.output is Output.POOL:
            outcome.embedding = self.model.embedding(digests[end - 1])
        elif row.output is Output.SAMPLE and request.beam:
            outcome.candidates = self.model.candidates(request, digests[end - 1])
        elif row.output is Output.SAMPLE:
            verified = list(self._verify(device, row, [digests[q] for q in range(begin - 1, end)]))
            outcome.tokens = tuple(token for _, token in verified)
            if request.sampling.logprobs is not None:
                outcome.logprobs = tuple(self.model.described(digest, token) for digest, token in verified)
        return outcome

    def _wanted(self, row: Row, device: DeviceRow, start: int, end: int) -> Iterator[int]:
        """Positions whose digest is asked for."""
        if row.prompt_logprobs:
            yield from range(start, min(end, len(device.request.tokens) - 1))
        if row.output is not Output.NONE:
            yield from range(end - 1 - len(row.draft), end)

    def _verify(self, device: DeviceRow, row: Row, digests: list[int]) -> Iterator[tuple[int, int]]:
        """The model's own token after each position, and the digest there, as long as a guess was right."""
        last: int | None = -1
        while last is not None:
            token = self.model.token(device.request, device.sibling, digests[last + 1])
            yield digests[last + 1], token
            last = next((i for i, one in enumerate(row.draft) if (one.parent, one.token) == (last, token)), None)

    def _guess(self, plan: Plan, device: DeviceRow) -> tuple[Draft, ...]:
        drafting, seed = self.drafting, self.seed
        number = len(device.tokens) * 64 + device.sibling
        if chance(seed, plan.number, number, 3) >= drafting.rate:
            return ()
        chain, drafts = list(device.chain), []
        extend(chain, device.tokens[len(chain) :], device.request.salt)
        for i in range(1 + int(chance(seed, plan.number, number, 4) * drafting.longest)):
            token = self.model.token(device.request, device.sibling, self.model.digest(chain, len(chain) - 1))
            if chance(seed, plan.number, number, 5, i) >= drafting.accuracy:
                token = 1
            drafts.append(Draft(token, i - 1))
            extend(chain, [token], device.request.salt)
        is_tree = chance(seed, plan.number, number, 6) < 0.5  # where trees are not verified, a line is taken out of it
        return tuple(branch(drafts, seed + plan.number + number) if is_tree else drafts)

    def _count(self, device: DeviceRow, start: int, end: int) -> None:
        reach = self.reach.get(device.name, 0)
        known = min(end, len(device.tokens))
        self.tally.num_computed += end - start
        self.tally.num_recomputed += max(0, min(known, reach) - start)
        self.reach[device.name] = max(reach, known)
