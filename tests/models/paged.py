"""A small paged-cache driver: sequences cut into chunks, many in one step, old window blocks poisoned and reused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.cache.group import group_layers
from penstock.models.decoder import Decoder
from penstock.ops.cache import cache_pool
from penstock.runner.step import LayerCache, Step, ends_of


@dataclass
class Row:
    tokens: list[int]
    wanted: int  # tokens to generate
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # one [V] per computed position


class Paged:
    """Greedy decoding of several prompts at once."""

    checks_ends = True

    def __init__(self, model: Decoder, num_blocks: int = 256, block_size: int = 8, seed: int = 0) -> None:
        self.model, self.block_size = model, block_size
        self.states = model.spec.states
        self.groups = group_layers(self.states, block_size).groups
        owner = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        self.caches = []
        for layer, shape in enumerate(model.spec.kv_shapes()):
            assert shape is not None
            pool = cache_pool(num_blocks, shape[0], block_size, shape[1], torch.float32, fill=torch.nan)
            self.caches.append(LayerCache(pool["k_cache"], pool["v_cache"], owner[layer]))
        self.random = random.Random(seed)
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)
        self.num_freed = 0

    def _place(self, row: Row, count: int) -> None:
        """Blocks for the next `count` positions; blocks that no window reaches any more are poisoned and freed."""
        for index, group in enumerate(self.groups):
            table = row.tables[index]
            while len(table) * self.block_size < row.computed + count:
                table.append(self.free.pop())
            for number in range(group.spec.first_needed(row.computed) // self.block_size):
                if table[number] >= 0:
                    for layer in group.layers:
                        self.caches[layer].k[table[number]] = torch.nan
                        self.caches[layer].v[table[number]] = torch.nan
                    self.free.insert(0, table[number])
                    table[number] = -1
                    self.num_freed += 1

    def _step(self, work: Sequence[tuple[Row, int]]) -> Step:
        for row, count in work:
            self._place(row, count)
        positions = [list(range(row.computed, row.computed + count)) for row, count in work]
        width = max(len(row.tables[0]) for row, _ in work)
        tables, slots = [], []
        for index in range(len(self.groups)):
            padded = [row.tables[index] + [-1] * (width - len(row.tables[index])) for row, _ in work]
            tables.append(torch.tensor(padded, dtype=torch.int32))
            slots.append(
                torch.tensor(
                    [
                        row.tables[index][p // self.block_size] * self.block_size + p % self.block_size
                        for (row, _), ps in zip(work, positions)
                        for p in ps
                    ]
                )
            )
        ids = [token for row, count in work for token in row.tokens[row.computed : row.computed + count]]
        starts = torch.tensor([0] + [count for _, count in work]).cumsum(0)
        return Step(
            torch.tensor(ids),
            torch.tensor([p for ps in positions for p in ps]),
            slots,
            tables,
            starts.to(torch.int32),
            torch.tensor([row.computed + n for row, n in work], dtype=torch.int32),
        )

    def _check_ends(self, step: Step, logits: torch.Tensor) -> None:
        """The last tokens' logits are the same bits where only they are asked for."""
        at = step.query_start[1:].long() - 1
        ends = ends_of(step, at, torch.arange(len(at)))
        assert torch.equal(self.model.logits(self.model.forward(step, self.caches, ends)), logits[at])
        assert self.model.forward(step, self.caches, ends_of(step, at[:0], at[:0])).shape[0] == 0

    def run(self, prompts: Sequence[Sequence[int]], num_new: int, chunk: int) -> list[Row]:
        rows = [Row(list(prompt), len(prompt) + num_new, tables=[[] for _ in self.groups]) for prompt in prompts]
        while any(row.computed < row.wanted - 1 for row in rows):
            work = [
                (row, min(self.random.randint(1, chunk), len(row.tokens) - row.computed))
                for row in rows
                if row.computed < row.wanted - 1
            ]
            step = self._step(work)
            logits = self.model.logits(self.model.forward(step, self.caches), torch.arange(step.ids.shape[0]))
            if self.checks_ends:
                self._check_ends(step, logits)
            for (row, count), part in zip(work, logits.split([count for _, count in work])):
                row.logits.extend(part)
                row.computed += count
                if row.computed == len(row.tokens):
                    row.tokens.append(int(part[-1].argmax()))
        return rows
