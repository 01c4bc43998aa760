"""Steps that verify trees of draft tokens: what each node sees, and the move of the accepted path to its places.

Node i of a tree lies at the place of the i-th token of a line, at a position that its depth says. After the step the
keys and values of the accepted path are moved to where a line would have left them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock import ops
from penstock.engine.draft_tree import find_moves, find_paths, is_line
from penstock.engine.plan import Plan, RowResult
from penstock.layers.memory import KvCache, LatentCache
from penstock.runner.rows import RunningRow
from penstock.runner.step import Step


def has_trees(plan: Plan) -> bool:
    return any(row.draft and not is_line(row.draft) for row in plan.rows)


class TreeBuffers:
    """Places and paths of a step's tokens, at fixed addresses."""

    def __init__(self, num_tokens: int, num_sequences: int, width: int) -> None:
        self.places = np.zeros(num_tokens, dtype=np.int64)
        self.begins = np.zeros(num_sequences, dtype=np.int32)
        self.nodes = np.zeros((num_tokens, width), dtype=np.int32)
        self._tensors = [torch.from_numpy(one) for one in (self.places, self.begins, self.nodes)]

    def fill(self, plan: Plan, positions: np.ndarray, lengths: np.ndarray) -> None:
        """Write the plan's trees. `positions` holds places, and gets the positions of nodes instead."""
        num_tokens, num_sequences = plan.num_tokens, len(plan.rows)
        self.places[:num_tokens] = positions[:num_tokens]
        self.begins[:num_sequences] = lengths[:num_sequences]
        first = 0
        for s, row in enumerate(plan.rows):
            first += row.count
            if not row.draft or is_line(row.draft):
                continue
            begin = row.start + row.count - len(row.draft)
            self.begins[s] = begin
            paths = find_paths(row.draft)[-row.count :]
            for t, path in enumerate(paths, start=first - len(paths)):
                positions[t] = begin + len(path) - 1
                self.nodes[t, : len(path)] = path

    def enter(self, step: Step) -> None:
        """Put them into a step of the same tokens."""
        places, begins, nodes = self._tensors
        num_tokens, num_sequences = len(step.ids), len(step.lengths)
        step.places = places[:num_tokens]
        step.tail = ops.Tail(begins[:num_sequences], step.positions, nodes[:num_tokens])


def move_paths(
    plan: Plan,
    rows: Sequence[RunningRow],
    results: Sequence[RowResult],
    caches: Sequence[KvCache | LatentCache | None],
    block_size: int,
) -> None:
    """Move the keys and values of accepted paths to their places, in every layer. Mostly they lie there already."""
    by_group: dict[int, torch.Tensor] = {}
    found: list[tuple[RunningRow, np.ndarray]] = []
    for row, device, result in zip(plan.rows, rows, results):
        moves = find_moves(row.draft, result.tokens) if row.draft else []
        if moves:
            found.append((device, np.array(moves) + row.start + row.count - len(row.draft)))
    if not found:
        return
    for cache in caches:
        if cache is None:
            continue
        if cache.group not in by_group:
            own = [
                device.tables[cache.group][places // block_size].astype(np.int64) * block_size + places % block_size
                for device, places in found
            ]
            by_group[cache.group] = torch.from_numpy(np.concatenate(own))
        slots = by_group[cache.group]
        if isinstance(cache, LatentCache):
            ops.latent_move(cache.latent, slots)
        else:
            ops.cache_move(cache.k, cache.v, slots, cache.k_scale, cache.v_scale)
