"""A device that remembers. Its tokens are hashes of what it reads back from its blocks, and it checks every read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from penstock.cache.kv import KVCache
from penstock.engine.executor import Answer, Describe, Done, obey
from penstock.engine.plan import Plan, Result, Row, RowResult
from penstock.types.speculation import count_most
from tests.simulation.device import GARBAGE, DeviceRow, Memory, Tally, Task, Work, require
from tests.simulation.faults import Faults
from tests.simulation.forward import Drafting, Forward
from tests.simulation.inspection import Limits, inspect_blocks, inspect_size
from tests.simulation.keeping import FakeStore
from tests.simulation.model import Model

Cell = tuple[int, int]  # a block, and an offset in it


class FakeTicket:
    def __init__(self, executor: FakeExecutor, work: Work) -> None:
        self.executor = executor
        self.work = work

    def result(self) -> Result:
        return self.executor.finish(self.work)


class FakeExecutor:
    """Plans run in order: at once, or (`lazy`) not before someone waits for them."""

    def __init__(
        self,
        cache: KVCache,
        model: Model,
        limits: Limits,
        *,
        faults: Faults | None = None,
        drafting: Drafting | None = None,
        lazy: bool = True,
        strict: bool = True,
        trees: bool = False,
        store: FakeStore | None = None,
        counts: bool = True,
    ) -> None:
        """`counts`: a row goes on from where the device says it stands, whatever is verified meanwhile."""
        self.cache, self.counts = cache, counts
        self.store = store
        self.limits = limits
        self.faults = faults or Faults()
        self.lazy = lazy
        self.verifies_trees = trees
        self.memory = Memory(cache.pool.num_blocks, cache.block_size)
        self.rows: dict[int, DeviceRow] = {}
        self.unfinished: deque[Work] = deque()
        self.spoiled: dict[Cell, int] = {}  # and the plan that should have filled it and did not
        self.blamed: set[tuple[str, int]] = set()  # failed alone: these may end with an error
        self.tally = Tally()
        self.forward = Forward(cache, model, self.memory, self.tally, drafting or Drafting(), self.faults.seed, strict)
        self.num_plans = 0  # that have run
        self.closed = False

    def start(self, plan: Plan) -> FakeTicket:
        require(not self.closed, "a plan after the end", plan)
        inspect_size(plan, self.limits)
        starts = {row.row: row.start for row in plan.rows}
        for admission in plan.admissions:
            self.rows[admission.row] = DeviceRow(
                admission.request,
                admission.sibling,
                list(admission.tokens),
                [[] for _ in self.cache.groups],
                starts[admission.row],
            )
        beside = frozenset([plan.number, *(earlier.plan.number for earlier in self.unfinished)])
        work = Work(plan, [self._task(row) for row in plan.rows], beside)
        inspect_blocks(work, self.unfinished, self.cache)
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
            task.device.num_drafting -= len(task.row.draft)
        assert work.result is not None
        return work.result

    def control(self, message: object) -> Done[Answer]:
        """In order with plans: those started before it that nobody waited for yet run first."""
        for work in self.unfinished:
            if work.result is None:
                self._run(work)
        return Done(obey(message, {Describe: lambda _: {"device": "simulated", "num_plans": self.num_plans}}))

    def close(self) -> None:
        require(not self.unfinished, "closed with unfinished plans")
        self.closed = True

    def _task(self, row: Row) -> Task:
        require(row.row in self.rows, "a row that was never admitted", row)
        device = self.rows[row.row]
        last = len(device.request.tokens) + (0 if device.request.pool else device.request.max_tokens - 1)
        require(row.start + row.count <= last, "a position past the end of the answer", row, last)
        require(self.counts or not device.num_drafting, "a row whose drafts are verified is planned", row)
        most = count_most(device.request.sampling.speculation)
        require(len(row.draft) <= most, "more drafts than the request takes", row, most)
        for table, changes in zip(device.tables, row.blocks, strict=bool(row.blocks)):
            for index, block in changes.items():
                table.extend([-1] * (index + 1 - len(table)))
                table[index] = block
        if any(draft.parent != i - 1 for i, draft in enumerate(row.draft)):
            self.tally.num_trees += 1
            is_open = any(task.device is device for work in self.unfinished for task in work.tasks)
            require(self.verifies_trees and not is_open, "a tree that the device does not verify", row)
        task = Task(
            row,
            device,
            [self._visible(device, g) for g in range(len(device.tables))],
            exact=device.num_drafting == 0,
            first=max(row.start - device.num_drafting, device.computed),
        )
        device.num_drafting += len(row.draft)
        return task

    def _visible(self, device: DeviceRow, g: int) -> list[int]:
        """A copy of the row's table without what lies before its window."""
        spec = self.cache.groups[g].spec
        if spec.kind != "window":
            return list(device.tables[g])
        gone = spec.find_first_needed(device.computed) // self.cache.block_size
        return [-1] * gone + device.tables[g][gone:]

    def _run(self, work: Work) -> None:
        self.num_plans += 1
        plan, fault = work.plan, self.faults.of_step(work)
        self.tally.num_moves += len(plan.moves)
        if fault is not None:
            self._fail(work, fault)
            return
        self._save(work)
        if not self._load(work):
            self._lose(work)
            return
        for move in plan.moves:
            self.memory.copy(move.source, move.target)
            for offset in range(self.cache.block_size):
                spoiled = self._is_void(work, [(move.source, offset)])
                self._mark([(move.target, offset)], plan.number if spoiled else None)
        work.result = Result(plan.number, [self._outcome(work, task) for task in work.tasks])

    def _save(self, work: Work) -> None:
        for save in work.plan.saves:
            assert self.store is not None
            self.store.save(save.name, [self.memory.cells[block] for block in save.blocks])

    def _load(self, work: Work) -> bool:
        """Fill all that the plan loads; False if the store has one of them no more."""
        for load in work.plan.loads:
            assert self.store is not None
            found = self.store.load(load.name)
            if found is None:
                return False
            for block, cells in zip(load.blocks, found, strict=True):
                self.memory.cells[block] = list(cells)
                self._mark([(block, offset) for offset in range(self.cache.block_size)], None)
        return True

    def _lose(self, work: Work) -> None:
        """There is no step, as one of its blocks is lost."""
        self.tally.num_lost += 1
        self._skip(work, spoils=False)
        work.result = Result(work.plan.number, lost=True)

    def _skip(self, work: Work, spoils: bool) -> None:
        """Nothing that the plan was to write is there."""
        targets = [move.target for move in work.plan.moves] + [b for load in work.plan.loads for b in load.blocks]
        for target in targets:
            self._mark([(target, offset) for offset in range(self.cache.block_size)], work.plan.number)
            if spoils:
                self.memory.spoil(target)
        for task in work.tasks:
            self._spoil(work, task, writes=spoils)
            task.device.broken = True

    def _fail(self, work: Work, fault: str) -> None:
        """The whole step fails; in the middle of it, everything it was to write is garbage."""
        self.tally.num_failed_steps += 1
        self._skip(work, spoils=fault == "middle")
        if len(work.tasks) == 1:
            self.blamed.add(work.tasks[0].device.name)
        work.result = Result(work.plan.number, error=f"the step failed: {fault}")

    def _mark(self, cells: Iterable[Cell], spoiled_by: int | None) -> None:
        for cell in cells:
            self.spoiled.pop(cell, None)
            if spoiled_by is not None:
                self.spoiled[cell] = spoiled_by

    def _is_void(self, work: Work, cells: Iterable[Cell]) -> bool:
        """Whether a plan reads what was not computed, started before that was known."""
        return any(self.spoiled.get(cell) in work.beside for cell in cells)

    def _cells(self, task: Task, g: int, start: int, end: int) -> list[Cell]:
        """Those of positions [start, end), or all of a recurrent state."""
        table, size = task.tables[g], self.cache.block_size
        if self.cache.groups[g].spec.kind == "recurrent":
            return [(block, offset) for block in table for offset in range(size)] if end else []
        return [(table[p // size], p % size) for p in range(start, min(end, len(table) * size))]

    def _reads(self, task: Task) -> Iterator[Cell]:
        start = task.device.computed
        for g, group in enumerate(self.cache.groups):
            yield from self._cells(task, g, group.spec.find_first_needed(start), start)

    def _outcome(self, work: Work, task: Task) -> RowResult:
        plan = work.plan
        if task.device.broken or self._is_void(work, self._reads(task)):
            self.tally.num_void += 1
            self._spoil(work, task)
            task.device.broken = True
            return RowResult(tokens=(GARBAGE,), candidates=((GARBAGE, 0.0),))
        if self.faults.of_row(plan, task.row):
            self.tally.num_failed_rows += 1
            self._spoil(work, task)
            task.device.broken = True
            self.blamed.add(task.device.name)
            return RowResult(error="the row failed")
        start = task.device.computed
        outcome = self.forward.run(plan, task)
        for g in range(len(self.cache.groups)):
            self._mark(self._cells(task, g, start, start + task.row.count), None)
        return outcome

    def _spoil(self, work: Work, task: Task, writes: bool = True) -> None:
        """Fill what the row may write with garbage, or leave there what was there."""
        size, start = self.cache.block_size, max(task.first, task.device.computed)
        for g, group in enumerate(self.cache.groups):
            table, recurrent = task.tables[g], group.spec.kind == "recurrent"
            end = min(start + task.row.count, len(table) * size)
            self._mark(self._cells(task, g, start, end), work.plan.number)
            if recurrent and writes:
                self.memory.write_state(table, GARBAGE)
            elif writes:
                self.memory.write(table, start, [GARBAGE] * (end - start))
