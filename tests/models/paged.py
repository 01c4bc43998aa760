"""A small paged-cache driver: sequences cut into chunks, many in one step, old window blocks poisoned and reused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.cache.group import group_layers
from penstock.models.decoder import Decoder
from penstock.runner.memory import BlockMemory
from penstock.runner.step import Step, ends_of


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
        grouping = group_layers(model.spec.states(), block_size)
        self.groups = grouping.groups
        self.memory = memory = BlockMemory(num_blocks, block_size, grouping, "float32")
        memory.blocks.view(torch.float32).fill_(torch.nan)
        self.caches = memory.views(model.spec.memories())
        self.random = random.Random(seed)
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)
        self.num_freed = 0

    def _place(self, row: Row, count: int) -> None:
        """Blocks for the next `count` positions or for a recurrent state; blocks that no window reaches any more are
        poisoned and freed."""
        for index, group in enumerate(self.groups):
            table = row.tables[index]
            if not group.is_paged:
                table += [self.free.pop() for _ in range(group.blocks_per_state - len(table))]
                continue
            while len(table) * self.block_size < row.computed + count:
                table.append(self.free.pop())
            for number in range(group.spec.find_first_needed(row.computed) // self.block_size):
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
        tables: list[torch.Tensor] = []
        slots: list[torch.Tensor | None] = []
        for index, group in enumerate(self.groups):
            width = max(len(row.tables[index]) for row, _ in work)
            padded = [row.tables[index] + [-1] * (width - len(row.tables[index])) for row, _ in work]
            tables.append(torch.tensor(padded, dtype=torch.int32))
            slots.append(
                None
                if not group.is_paged
                else torch.tensor(
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

    def _check_ends(self, step: Step, logits: torch.Tensor, before: torch.Tensor) -> None:
        """The last tokens' logits are the same bits where only they are asked for, and memory is as after the step."""
        at = step.query_start[1:].long() - 1
        after = self.memory.blocks.clone()
        self.memory.blocks.copy_(before)
        step.ends = ends_of(step, at, torch.arange(len(at)))
        assert torch.equal(self.model.logits(self.model.forward(step, self.caches)), logits[at])
        assert torch.equal(self.memory.blocks, after)
        self.memory.blocks.copy_(before)
        step.ends = ends_of(step, at[:0], at[:0])
        assert self.model.forward(step, self.caches).shape[0] == 0
        assert torch.equal(self.memory.blocks, after)

    def run(self, prompts: Sequence[Sequence[int]], num_new: int, chunk: int) -> list[Row]:
        rows = [Row(list(prompt), len(prompt) + num_new, tables=[[] for _ in self.groups]) for prompt in prompts]
        while any(row.computed < row.wanted - 1 for row in rows):
            work = [
                (row, min(self.random.randint(1, chunk), len(row.tokens) - row.computed))
                for row in rows
                if row.computed < row.wanted - 1
            ]
            step = self._step(work)
            before = self.memory.blocks.clone()
            logits = self.model.logits(self.model.forward(step, self.caches), torch.arange(step.ids.shape[0]))
            if self.checks_ends:
                self._check_ends(step, logits, before)
            for (row, count), part in zip(work, logits.split([count for _, count in work])):
                row.logits.extend(part)
                row.computed += count
                if row.computed == len(row.tokens):
                    row.tokens.append(int(part[-1].argmax()))
        return rows
