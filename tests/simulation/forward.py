"""One row of one step on the simulated device: write its positions, read back what they see, answer from that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.cache.kv import KVCache
from penstock.engine.plan import Draft, Output, Plan, Row, RowResult
from tests.simulation.device import DeviceRow, Memory, Tally, Task, require
from tests.simulation.model import Chain, Model, chance, extend


@dataclass(frozen=True)
class Drafting:
    """How often the device guesses, how far, and how well."""

    rate: float = 0.0
    longest: int = 4
    accuracy: float = 0.7


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
        extend(values, guesses, device.request.salt)
        self._count(device, start, end)
        views = [self._forward(task, g, values, start, end) for g in range(len(self.cache.groups))]
        outcome = self._output(row, device, views, values, start, end)
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

    def _digest(self, views: list[tuple[int, Chain]], values: Chain, position: int) -> int:
        parts = []
        for (first, cells), group in zip(views, self.cache.groups):
            low = position if group.spec.kind == "recurrent" else group.spec.find_first_needed(position)
            parts.append(hash(tuple(cells[low - first : position + 1 - first])))
        return self.model.join(parts or [values[position]])

    def _output(
        self, row: Row, device: DeviceRow, views: list[tuple[int, Chain]], values: Chain, start: int, end: int
    ) -> RowResult:
        request, outcome = device.request, RowResult()
        digests = {q: self._digest(views, values, q) for q in self._wanted(row, device, start, end)}
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
            first = end - 1 - len(row.draft)
            outcome.tokens = tuple(self._verify(device, row, [digests[q] for q in range(first, end)]))
            if request.sampling.logprobs is not None:
                outcome.logprobs = tuple(
                    self.model.described(digests[first + i], token) for i, token in enumerate(outcome.tokens)
                )
        return outcome

    def _wanted(self, row: Row, device: DeviceRow, start: int, end: int) -> Iterator[int]:
        """Positions whose digest is asked for."""
        if row.prompt_logprobs:
            yield from range(start, min(end, len(device.request.tokens) - 1))
        if row.output is not Output.NONE:
            yield from range(end - 1 - len(row.draft), end)

    def _verify(self, device: DeviceRow, row: Row, digests: list[int]) -> Iterator[int]:
        """The model's own token after each position, as long as the guess before it was right."""
        for i, digest in enumerate(digests):
            token = self.model.token(device.request, device.sibling, digest)
            yield token
            if i < len(row.draft) and row.draft[i].token != token:
                return

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
        if chance(seed, plan.number, number, 6) < 0.1:
            drafts.insert(1, Draft(2, -1))  # a tree: the scheduler takes a line out of it
        return tuple(drafts)

    def _count(self, device: DeviceRow, start: int, end: int) -> None:
        reach = self.reach.get(device.name, 0)
        known = min(end, len(device.tokens))
        self.tally.num_computed += end - start
        self.tally.num_recomputed += max(0, min(known, reach) - start)
        self.reach[device.name] = max(reach, known)
