"""A device that remembers. Its tokens are hashes of what it reads back from its blocks, and it checks every read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.cache.kv import KVCache
from penstock.engine.plan import Draft, Output, Plan, Result, Row, RowResult
from tests.simulation.device import GARBAGE, DeviceRow, Memory, Task, Work, require
from tests.simulation.inspection import Limits, inspect_blocks, inspect_size
from tests.simulation.model import Chain, Model, chance, extend


@dataclass
class Faults:
    """What goes wrong, decided by the seed and the plan's number alone."""

    seed: int = 0
    step_rate: float = 0.0
    row_rate: float = 0.0
    poison: set[str] = field(default_factory=set)      # requests that no step survives

    def of_step(self, work: Work) -> str | None:
        if any(task.device.request.id in self.poison for task in work.tasks):
            return "middle"
        draw = chance(self.seed, work.plan.number, 1) / self.step_rate if self.step_rate else 1.0
        return None if draw >= 1 else "before" if draw < 0.5 else "middle"

    def of_row(self, plan: Plan, row: Row) -> bool:
        return chance(self.seed, plan.number, row.row, 2) < self.row_rate


@dataclass(frozen=True)
class Drafting:
    """How often the device guesses, how far, and how well."""

    rate: float = 0.0
    longest: int = 4
    accuracy: float = 0.7


@dataclass
class Tally:
    """What the device did."""

    num_computed: int = 0
    num_recomputed: int = 0        # positions computed again by the same sequence
    num_moves: int = 0
    num_failed_steps: int = 0
    num_failed_rows: int = 0
    num_void: int = 0              # rows that ran although their last step had failed
    num_rejected: int = 0          # guesses


class FakeTicket:
    def __init__(self, executor: FakeExecutor, work: Work) -> None:
        self.executor = executor
        self.work = work

    def result(self) -> Result:
        return self.executor.finish(self.work)


class FakeExecutor:
    """Plans run in order: at once, or (`lazy`) not before someone waits for them."""

    def __init__(self, cache: KVCache, model: Model, limits: Limits, *, faults: Faults | None = None,
                 drafting: Drafting | None = None, lazy: bool = True, strict: bool = True) -> None:
        self.cache = cache
        self.model = model
        self.limits = limits
        self.faults = faults or Faults()
        self.drafting = drafting or Drafting()
        self.lazy = lazy
        self.strict = strict           # raise at the first wrong read; otherwise it shows in the tokens
        self.memory = Memory(cache.pool.num_blocks, cache.block_size)
        self.rows: dict[int, DeviceRow] = {}
        self.unfinished: deque[Work] = deque()
        self.blamed: set[tuple[str, int]] = set()      # failed alone: these may end with an error
        self.reach: dict[tuple[str, int], int] = {}
        self.tally = Tally()
        self.closed = False

    def start(self, plan: Plan) -> FakeTicket:
        require(not self.closed, "a plan after the end", plan)
        inspect_size(plan, self.limits)
        starts = {row.row: row.start for row in plan.rows}
        for admission in plan.admissions:
            self.rows[admission.row] = DeviceRow(admission.request, admission.sibling, list(admission.tokens),
                                                 [[] for _ in self.cache.groups], starts[admission.row])
        work = Work(plan, [self._task(row) for row in plan.rows])
        inspect_blocks(work, self.unfinished, self.cache)
        for earlier in self.unfinished:
            if earlier.result is not None and earlier.result.error is not None:
                self._void(earlier, work)
        self.unfinished.append(work)
        if not self.lazy:
            self._run(work)
        return FakeTicket(self, work)

    def finish(self, work: Work) -> Result:
        require(bool(self.unfinished) and self.unfinished[0] is work, "plans are awaited out of order", work.plan)
        self.unfinished.popleft()
        if work.result is None:
            self._run(work)
        for task in work.tasks:
            task.device.num_drafting -= bool(task.row.draft)
        assert work.result is not None
        return work.result

    def close(self) -> None:
        require(not self.unfinished, "closed with unfinished plans")
        self.closed = True

    def _task(self, row: Row) -> Task:
        require(row.row in self.rows, "a row that was never admitted", row)
        device = self.rows[row.row]
        last = len(device.request.tokens) + (0 if device.request.pool else device.request.max_tokens - 1)
        require(row.start + row.count <= last, "a position past the end of the answer", row, last)
        for table, changes in zip(device.tables, row.blocks, strict=True):
            for index, block in changes:
                table.extend([-1] * (index + 1 - len(table)))
                table[index] = block
        task = Task(row, device, [self._visible(device, g) for g in range(len(device.tables))],
                    exact=device.num_drafting == 0)
        device.num_drafting += bool(row.draft)
        return task

    def _visible(self, device: DeviceRow, g: int) -> list[int]:
        """A copy of the row's table without what lies before its window."""
        spec = self.cache.groups[g].spec
        if spec.kind != "window":
            return list(device.tables[g])
        gone = spec.first_needed(device.computed) // self.cache.block_size
        return [-1] * gone + device.tables[g][gone:]

    def _run(self, work: Work) -> None:
        plan, fault = work.plan, self.faults.of_step(work)
        self.tally.num_moves += len(plan.moves)
        if fault is not None:
            self._fail(work, fault)
            return
        for move in plan.moves:
            self.memory.copy(move.source, move.target)
        work.result = Result(plan.number, [self._outcome(plan, task) for task in work.tasks])

    def _fail(self, work: Work, fault: str) -> None:
        """The whole step fails; in the middle of it, everything it was to write is garbage."""
        self.tally.num_failed_steps += 1
        if fault == "middle":
            for move in work.plan.moves:
                self.memory.spoil(move.target)
        for task in work.tasks:
            if fault == "middle":
                self._spoil(task)
            task.device.broken = True
        if len(work.tasks) == 1:
            self.blamed.add(work.tasks[0].device.name)
        work.result = Result(work.plan.number, error=f"the step failed: {fault}")
        for later in self.unfinished:
            if later.plan.number > work.plan.number:
                self._void(work, later)

    def _void(self, failed: Work, later: Work) -> None:
        """Rows of a plan that was started before the failure was known, and that read a copy which was never made."""
        lost = {move.target for move in failed.plan.moves}
        for move in later.plan.moves:
            if move.source in lost:
                lost.add(move.target)
        for task in later.tasks:
            if any(block in lost for table in task.tables for block in table):
                task.device.broken = True

    def _outcome(self, plan: Plan, task: Task) -> RowResult:
        if task.device.broken:
            self.tally.num_void += 1
            self._spoil(task)
            return RowResult(tokens=(GARBAGE,), candidates=((GARBAGE, 0.0),))
        if self.faults.of_row(plan, task.row):
            self.tally.num_failed_rows += 1
            self._spoil(task)
            task.device.broken = True
            self.blamed.add(task.device.name)
            return RowResult(error="the row failed")
        return self._compute(plan, task)

    def _spoil(self, task: Task) -> None:
        """Fill what the row may write with garbage."""
        start = task.device.computed
        for g, group in enumerate(self.cache.groups):
            if group.spec.kind == "recurrent":
                self.memory.write_state(task.tables[g], GARBAGE)
            else:
                end = min(start + task.row.count, len(task.tables[g]) * self.cache.block_size)
                self.memory.write(task.tables[g], start, [GARBAGE] * (end - start))

    def _compute(self, plan: Plan, task: Task) -> RowResult:
        row, device = task.row, task.device
        device.tokens.extend(row.tokens)
        start = device.computed
        require(start == row.start if task.exact else start <= row.start, "the row stands elsewhere", start, row)
        end, known, guesses = start + row.count, len(device.tokens), [draft.token for draft in row.draft]
        require(end <= known + len(guesses), "more positions than tokens", end, known, row)
        require((row.output is Output.NONE) == (end < known) and (end <= known) == (not guesses),
                "a wrong kind of output", row, end, known)
        require(row.output is not Output.POOL or row.count == len(device.request.tokens), "a pooled row in parts", row)
        extend(device.chain, device.tokens[len(device.chain):], device.request.salt)
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
            self._compare(states, values[start - 1:start] if start else [], task, g)
            extend(states, task.device.tokens[start:end], task.device.request.salt)
            self.memory.write_state(table, states[-1])
            return end - len(states), states
        first = spec.first_needed(start)
        self.memory.write(table, start, values[start:end])
        cells = self.memory.read(table, first, end)
        self._compare(cells, values[first:end], task, g)
        return first, cells

    def _compare(self, got: Chain, expected: Chain, task: Task, g: int) -> None:
        if self.strict and got != expected:
            wrong = next(i for i, pair in enumerate(zip(got, expected)) if pair[0] != pair[1])
            require(False, f"group {g} reads a wrong value, number {wrong} of {len(expected)}", task.device.name,
                    task.row, task.tables[g])

    def _digest(self, views: list[tuple[int, Chain]], values: Chain, position: int) -> int:
        parts = []
        for (first, cells), group in zip(views, self.cache.groups):
            low = position if group.spec.kind == "recurrent" else group.spec.first_needed(position)
            parts.append(hash(tuple(cells[low - first:position + 1 - first])))
        return self.model.join(parts or [values[position]])

    def _output(self, row: Row, device: DeviceRow, views: list[tuple[int, Chain]], values: Chain, start: int,
                end: int) -> RowResult:
        request, outcome = device.request, RowResult()
        digests = {q: self._digest(views, values, q) for q in self._wanted(row, device, start, end)}
        if row.prompt_logprobs:
            outcome.prompt_logprobs = tuple(self.model.described(digests[q], request.tokens[q + 1])
                                            for q in range(start, min(end, len(request.tokens) - 1)))
        if row.output is Output.POOL:
            outcome.embedding = self.model.embedding(digests[end - 1])
        elif row.output is Output.SAMPLE and request.beam:
            outcome.candidates = self.model.candidates(request, digests[end - 1])
        elif row.output is Output.SAMPLE:
            first = end - 1 - len(row.draft)
            outcome.tokens = tuple(self._verify(device, row, [digests[q] for q in range(first, end)]))
            if request.sampling.logprobs is not None:
                outcome.logprobs = tuple(self.model.described(digests[first + i], token)
                                         for i, token in enumerate(outcome.tokens))
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
        drafting, seed = self.drafting, self.faults.seed
        number = len(device.tokens) * 64 + device.sibling
        if chance(seed, plan.number, number, 3) >= drafting.rate:
            return ()
        chain, drafts = list(device.chain), []
        extend(chain, device.tokens[len(chain):], device.request.salt)
        for i in range(1 + int(chance(seed, plan.number, number, 4) * drafting.longest)):
            token = self.model.token(device.request, device.sibling, self.model.digest(chain, len(chain) - 1))
            if chance(seed, plan.number, number, 5, i) >= drafting.accuracy:
                token = 1
            drafts.append(Draft(token, i - 1))
            extend(chain, [token], device.request.salt)
        if chance(seed, plan.number, number, 6) < 0.1:
            drafts.insert(1, Draft(2, -1))     # a tree: the scheduler takes a line out of it
        return tuple(drafts)

    def _count(self, device: DeviceRow, start: int, end: int) -> None:
        reach = self.reach.get(device.name, 0)
        known = min(end, len(device.tokens))
        self.tally.num_computed += end - start
        self.tally.num_recomputed += max(0, min(known, reach) - start)
        self.reach[device.name] = max(reach, known)
