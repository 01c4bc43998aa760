"""What the device knows of each running sequence between plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from penstock.engine.plan import Admission, Plan, Row
from penstock.sampling.grammars import Grammars
from penstock.sampling.row import RowState


class DeviceRow:
    """A sequence's tokens and sampling state, and its block table in each group."""

    def __init__(self, admission: Admission, num_groups: int, grammars: Grammars | None) -> None:
        self.state = RowState(
            admission.request,
            admission.sibling,
            admission.tokens,
            len(admission.request.tokens),
            grammars,
            admission.mu,
        )
        self.tables = [np.empty(0, dtype=np.int32) for _ in range(num_groups)]  # -1: no block
        self.version = 0  # grows when a table changes

    def apply(self, row: Row) -> None:
        for g, changes in enumerate(row.blocks):
            if changes:
                self._enter(g, changes)
        for token in row.tokens:
            self.state.append(token)

    def _enter(self, g: int, changes: dict[int, int]) -> None:
        self.version += 1
        indices, blocks = next(iter(changes.items())) if len(changes) == 1 else entries([changes])
        table, last = self.tables[g], max(changes)
        if last >= len(table):
            room = np.full(max(16, last + 1 - len(table), len(table)), -1, dtype=np.int32)
            table = self.tables[g] = np.concatenate((table, room))
        table[indices] = blocks

    def inputs(self, row: Row) -> list[int]:
        """The tokens at the row's positions, guesses included."""
        start = row.start
        known = self.state.tokens[start : start + row.count - len(row.draft)]
        return known + [draft.token for draft in row.draft]


def entries(changes: Sequence[dict[int, int]]) -> np.ndarray:
    """Indices and blocks [2, n], one table's after the other's."""
    count = sum(map(len, changes))
    found = np.empty((2, count), dtype=np.int64)
    found[0] = np.fromiter(chain.from_iterable(changes), np.int64, count)
    found[1] = np.fromiter(chain.from_iterable(map(dict.values, changes)), np.int64, count)
    return found


class Rows:
    def __init__(self, num_groups: int, grammars: Grammars | None = None) -> None:
        self.num_groups = num_groups
        self.grammars = grammars
        self.num_admitted = 0  # since the start
        self._rows: dict[int, DeviceRow] = {}

    def __getitem__(self, row: int) -> DeviceRow:
        return self._rows[row]

    def of(self, plan: Plan) -> list[DeviceRow]:
        known = self._rows
        return [known[row.row] for row in plan.rows]

    def apply(self, plan: Plan) -> None:
        """Take in admissions, table entries and tokens chosen by the host."""
        self.num_admitted += len(plan.admissions)
        for admission in plan.admissions:
            self._rows[admission.row] = DeviceRow(admission, self.num_groups, self.grammars)
        for row in plan.rows:
            if row.blocks or row.tokens:
                self._rows[row.row].apply(row)
