"""What the device knows of each running sequence between plans."""

from __future__ import annotations

import torch

from penstock.engine.plan import Admission, Plan, Row
from penstock.runner.step import Step
from penstock.sampling.row import RowState


class DeviceRow:
    """A sequence's tokens and sampling state, and its block table in each group."""

    def __init__(self, admission: Admission, num_groups: int) -> None:
        self.state = RowState(admission.request, admission.sibling, admission.tokens, len(admission.request.tokens))
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]

    def apply(self, row: Row) -> None:
        for table, changes in zip(self.tables, row.blocks):
            for index, block in changes:
                table.extend([-1] * (index + 1 - len(table)))
                table[index] = block
        for token in row.tokens:
            self.state.append(token)

    def inputs(self, row: Row) -> list[int]:
        """The tokens at the row's positions, guesses included."""
        start = row.start
        known = self.state.tokens[start:start + row.count - len(row.draft)]
        return known + [draft.token for draft in row.draft]


class Rows:
    def __init__(self, num_groups: int, block_size: int) -> None:
        self.num_groups = num_groups
        self.block_size = block_size
        self._rows: dict[int, DeviceRow] = {}

    def __getitem__(self, row: int) -> DeviceRow:
        return self._rows[row]

    def apply(self, plan: Plan) -> None:
        """Take in admissions, table entries and tokens chosen by the host."""
        for admission in plan.admissions:
            self._rows[admission.row] = DeviceRow(admission, self.num_groups)
        for row in plan.rows:
            self._rows[row.row].apply(row)

    def pack(self, plan: Plan) -> Step:
        """The plan's rows one after the other. Which tokens want logits is the runner's to say."""
        ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        starts = [0]
        for index, row in enumerate(plan.rows):
            ids.extend(self._rows[row.row].inputs(row))
            positions.extend(range(row.start, row.start + row.count))
            owners.extend([index] * row.count)
            starts.append(len(ids))
        if len(ids) != len(positions):
            raise RuntimeError(f"plan {plan.number} asks for tokens that its rows do not have")
        at = torch.tensor(positions, dtype=torch.int64)
        tables = [self._table(plan, g) for g in range(self.num_groups)]
        owner = torch.tensor(owners, dtype=torch.int64)
        size = self.block_size
        slots = [table[owner, at // size].long() * size + at % size for table in tables]
        lengths = torch.tensor([row.start + row.count for row in plan.rows], dtype=torch.int32)
        return Step(torch.tensor(ids, dtype=torch.int64), at, slots, tables,
                    torch.tensor(starts, dtype=torch.int32), lengths)

    def _table(self, plan: Plan, g: int) -> torch.Tensor:
        """[S, B]: the blocks of each row's positions up to this step's last."""
        needed = [-(-(row.start + row.count) // self.block_size) for row in plan.rows]
        width = max(needed, default=0)
        table = []
        for row, count in zip(plan.rows, needed):
            entries = self._rows[row.row].tables[g][:count]
            table.append(entries + [-1] * (width - len(entries)))
        return torch.tensor(table, dtype=torch.int32).reshape(len(plan.rows), width)
