"""What must hold of a plan when it is started: budget, rows, and who may write which block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.cache.kv import KVCache
from penstock.engine.plan import Output, Plan
from tests.simulation.device import DeviceRow, Work, require


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int


def inspect_size(plan: Plan, limits: Limits) -> None:
    require(len(plan.rows) > 0 or len(plan.saves) > 0, "an empty plan", plan)
    require(plan.num_tokens <= limits.max_num_batched_tokens, "the budget is exceeded", plan.num_tokens, limits)
    numbers = [row.row for row in plan.rows]
    require(len(set(numbers)) == len(numbers) <= limits.max_num_seqs, "a row twice, or too many", numbers)
    require(all(0 <= number < limits.max_num_seqs for number in numbers), "a row that is not there", numbers)
    require(all(row.count > 0 for row in plan.rows), "a row without work", plan)
    admitted = [admission.row for admission in plan.admissions]
    require(len(set(admitted)) == len(admitted), "a row admitted twice", admitted)
    require(set(admitted) <= set(numbers), "a row admitted without work", admitted, numbers)
    for row in plan.rows:
        draft = row.draft
        require(all(-1 <= one.parent < i for i, one in enumerate(draft)), "a guess without its parent", row)
        require(len(draft) < row.count or row.count == 0, "more draft than work", row)
        require(not draft or row.output is Output.SAMPLE, "a draft without a sample", row)


def inspect_blocks(work: Work, unfinished: Iterable[Work], cache: KVCache) -> None:
    """Blocks to be written have one owner, are in no prefix but by this very plan, and are named by no other row's
    unfinished plan."""
    busy: dict[int, DeviceRow] = {}
    for earlier in unfinished:
        for task in earlier.tasks:
            busy.update((block, task.device) for table in task.tables for block in table if block >= 0)
    written: set[int] = set()
    pool, number = cache.pool, work.plan.number
    fresh = {block for node, g in cache.uncomputed._by_plan.get(number, ()) for block in node.slots[g] or ()}

    def given_up(block: int) -> bool:
        """Only after this plan, for another block with the same tokens."""
        return pool.refs[block] == 0 and pool._busy[block] == number

    def own(block: int) -> bool:
        return pool.refs[block] == 1 == pool.num_users(block) or block in fresh or given_up(block)

    for task in work.tasks:
        for g, group in enumerate(cache.groups):
            table = task.tables[g]
            blocks = table if group.spec.kind == "recurrent" else table[task.first // cache.block_size :]
            for block in blocks:
                require(
                    block >= 0 and own(block),
                    "a block that is not its own is written",
                    block,
                    task.row,
                    pool.refs[block],
                )
                require(block not in written, "a block with two writers", block, task.row)
                require(
                    busy.get(block, task.device) is task.device,
                    "a block that a started plan names is written",
                    block,
                    task.row,
                )
                written.add(block)
            require(
                all(block < 0 or pool.refs[block] > 0 or given_up(block) for block in table),
                "a free block is read",
                task.row,
                table,
            )
    for task in work.tasks:
        for g, group in enumerate(cache.groups):
            read = task.tables[g][: task.first // cache.block_size] if group.spec.kind != "recurrent" else []
            require(written.isdisjoint(read), "a block is read that another row of the plan writes", task.row)
    targets = [move.target for move in work.plan.moves]
    require(len(set(targets)) == len(targets), "a block is moved to twice", work.plan.moves)
    require(
        all(own(target) and target not in busy for target in targets), "a move into a block in use", work.plan.moves
    )
    loaded = [block for load in work.plan.loads for block in load.blocks]
    require(len(set(loaded)) == len(loaded), "a block is loaded twice", work.plan.loads)
    require(
        all((block in fresh or given_up(block)) and block not in busy for block in loaded),
        "a load into a block in use",
        work.plan.loads,
    )
    due = {block for node, g in cache.uncomputed.list_places() for block in node.slots[g] or ()}
    for save in work.plan.saves:
        require(due.isdisjoint(save.blocks), "a block is saved before it is computed", save)
        require(all(pool._busy[block] >= number for block in save.blocks), "a block to be saved may be taken", save)
