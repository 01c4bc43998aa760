"""Steps of single tokens, recorded once for each number of sequences and replayed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch

from penstock import ops
from penstock.config import graph_sizes
from penstock.models.decoder import Decoder
from penstock.ops.extras import MU
from penstock.ops.inputs import NUM_COMMON, ROW
from penstock.ops.triton.attention import tile_tokens
from penstock.ops.triton.exact.attention import tile_tokens as exact_tile_tokens
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.cuda.shared import num_tiles
from penstock.runner.memory import BlockMemory
from penstock.runner.step import LayerCache, Step

MOST_PARTS, MOST_OF_SHORT, MOST_IN_COMMON = 32, 8, 16
SHORT = 512  # positions of the longest sequence
SELDOM = 8  # times
Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)
Made = TypeVar("Made")
PLAIN, WISHING, EXTRA = range(3)  # rows ask for a temperature; for filters and penalties; for rarer samplers
Key = tuple[int, bool, int]  # for how many sequences, with positions in common or none, with keys in so many parts


@dataclass(frozen=True)
class Chosen:
    """Tokens [S], what some rows ask to be told of them, and mirostat's mu after them."""

    tokens: torch.Tensor
    report: torch.Tensor | None = None
    mus: torch.Tensor | None = None


@dataclass
class Half(Generic[Made]):
    """Half a step; without a graph it is launched kernel by kernel."""

    function: Callable[[], Made]
    made: Made | None = None
    graph: torch.cuda.CUDAGraph | None = None
    num_runs: int = 0


@dataclass
class Recorded:
    """A step's logits, and the choice from them, by the most that any row asks for."""

    flat: torch.Tensor  # all that is sent, `numbers` first
    numbers: torch.Tensor
    step: Step
    forward: Half[torch.Tensor]
    choice: dict[int, Half[Chosen]]


def num_parts(num_single: int, longest: int, num_kv_heads: int, num_processors: int) -> int:
    """In how many parts the keys of single queries are read, so that every processor has some; of long texts in two
    rather than leave some processors half the work of others."""
    wanted, each = 2 * num_processors, max(1, num_single * num_kv_heads)
    if longest <= SHORT:
        return max(1, min(MOST_OF_SHORT, wanted // each))
    return max(1 + (each < wanted), min(MOST_PARTS, wanted // each))


def num_common_parts(num_sequences: int, tile_tokens: int, num_kv_heads: int, num_processors: int) -> int:
    """In how many parts the positions that tiles of sequences have in common are read, so that every processor has some
    beside what sequences have alone: a power of 2, of which fewer kernels come."""
    each = num_processors // (-(-num_sequences // tile_tokens) * num_kv_heads)
    return 1 << (max(1, min(MOST_IN_COMMON, each)).bit_length() - 1)


class SingleSteps:
    """Of each size: its tensors, all in the same places, and once it has run its graphs."""

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[LayerCache | None],
        rows: RowTensors,
        block_size: int,
        max_num_seqs: int,
        tile_tokens: int,
        num_processors: int,
        eager: bool,
        deterministic: bool,
    ) -> None:
        self.model, self.caches, self.rows, self.block_size = model, caches, rows, block_size
        self.sizes = graph_sizes(max_num_seqs)
        self.eager, self.deterministic = eager, deterministic
        device = rows.last.device
        self._processors = num_processors
        self._kv_heads = max((shape[0] for shape in model.spec.kv_shapes() if shape), default=1)
        num_groups = len(rows.tables)
        self.num_numbers = NUM_COMMON + 2 * num_groups
        self.tile_tokens = tile_tokens  # of one sequence, or sequences that share positions
        self._numbers = torch.zeros(self.num_flat(max_num_seqs, True), dtype=torch.int32, device=device)
        whole = torch.int64
        self._ids = torch.zeros(max_num_seqs, dtype=whole, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=whole, device=device)
        self._slots = [torch.zeros(max_num_seqs, dtype=whole, device=device) for _ in range(num_groups)]
        self._tables = [
            torch.full((max_num_seqs, table.shape[1]), -1, dtype=torch.int32, device=device) for table in rows.tables
        ]
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._known: dict[Key, Recorded] = {}
        self._wanted: Counter[Key] = Counter()  # and not recorded
        self._pool = None if eager else torch.cuda.graph_pool_handle()

    def warm(self, size: int, shared: bool = False, wishing: int = PLAIN, longest: int = 1) -> None:
        """A step of nobody's rows, so that the kernels it takes are compiled; safe to call from several threads."""
        ops.take_exact(self.deterministic)
        with torch.inference_mode():
            one = self._made(
                torch.zeros(self.num_flat(size, shared), dtype=torch.int32, device=self.rows.last.device),
                size,
                shared,
                self.num_parts(size, longest),
            )
            one.numbers.fill_(-1)
            one.numbers[ROW] = self.rows.nobody
            self.choose(self._forward(one.numbers, one.step), one.step.lengths, one.numbers[ROW], wishing)

    def num_parts(self, num_single: int, longest: int) -> int:
        return num_parts(num_single, longest, self._kv_heads, self._processors)

    def num_common_parts(self, size: int) -> int:
        return num_common_parts(size, self.tile_tokens, self._kv_heads, self._processors)

    def size(self, num_sequences: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_sequences)]

    def fitting(self, num_sequences: int, shared: bool, longest: int) -> Key:
        """The step to take for so many sequences. One that is seldom wanted is not worth recording, and slow without:
        a larger one that is recorded takes its place, with rows of nobody."""
        least = self.size(num_sequences)
        right = least, shared, self.num_parts(least, longest)
        if self.eager or self._is_recorded(right):
            return right
        self._wanted[right] += 1
        if self._wanted[right] > SELDOM:
            return right
        larger = ((size, shared, self.num_parts(size, longest)) for size in self.sizes if size > least)
        return next((key for key in larger if self._is_recorded(key)), right)

    def _is_recorded(self, key: Key) -> bool:
        return key in self._known and self._known[key].forward.graph is not None

    def num_flat(self, size: int, shared: bool) -> int:
        """How many numbers are sent: the rows', and where positions are shared who shares which."""
        return self.num_numbers * size + (2 * size + 4 * num_tiles(size, self.tile_tokens) if shared else 0)

    def split(self, flat: Numbers, size: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Its parts: the rows' numbers, and of shared positions members, skips and tiles, which may be empty."""
        end = self.num_numbers * size
        return (
            flat[:end].reshape(self.num_numbers, size),
            flat[end : end + size],
            flat[end + size : end + 2 * size],
            flat[end + 2 * size :].reshape(-1, 4),
        )

    def forget(self) -> None:
        """Give up all that was recorded."""
        self._known.clear()

    def __getitem__(self, key: Key) -> Recorded:
        if key not in self._known:
            self._known[key] = self._made(self._numbers[: self.num_flat(*key[:2])], *key)
        return self._known[key]

    def _made(self, flat: torch.Tensor, size: int, is_shared: bool, num_parts: int) -> Recorded:
        numbers, members, skips, tiles = self.split(flat, size)
        shared = ops.Shared(members, skips, tiles, self.num_common_parts(size)) if is_shared else None
        step = Step(
            self._ids[:size],
            self._positions[:size],
            [slots[:size] for slots in self._slots],
            [table[:size] for table in self._tables],
            self._starts[: size + 1],
            self._lengths[:size],
            ops.Work(size, None, num_parts, shared),
        )
        forward = Half(partial(self._forward, numbers, step))
        choice = {
            wishing: Half(partial(self._choose, forward, step, numbers[ROW], wishing))
            for wishing in (PLAIN, WISHING, EXTRA)
        }
        return Recorded(flat, numbers, step, forward, choice)

    def run(self, half: Half[Made]) -> Made:
        """From the second time on as a graph. A choice is never recorded before the logits that it reads: those lie in
        the same place only from then on."""
        if half.graph is None and half.num_runs and not self.eager:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                half.made = half.function()
            half.graph = graph
        if half.graph is not None:
            half.graph.replay()
        else:
            half.made = half.function()
        half.num_runs += 1
        assert half.made is not None
        return half.made

    def _forward(self, numbers: torch.Tensor, step: Step) -> torch.Tensor:
        for g, table in enumerate(self.rows.tables):
            ops.single_inputs(
                numbers,
                self.rows.last,
                table,
                g,
                self.block_size,
                step.ids,
                step.positions,
                step.lengths,
                step.slots[g],
                step.tables[g],
            )
        return self.model.logits(self.model.forward(step, self.caches))

    def _choose(self, forward: Half[torch.Tensor], step: Step, rows: torch.Tensor, wishing: int) -> Chosen:
        assert forward.made is not None
        return self.choose(forward.made, step.lengths, rows, wishing)

    def choose(self, logits: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, wishing: int) -> Chosen:
        """A token of each row of logits, whose texts have these lengths."""
        known, wishes, extras = self.rows, self.rows.wishes.tensors, self.rows.wishes.extras
        tokens = ops.sample(
            logits,
            known.temperature,
            known.keys,
            lengths.int(),
            rows,
            known.last,
            wishes if wishing else None,
            extras if wishing == EXTRA else None,
        )
        if not wishing:
            return Chosen(tokens)
        report = ops.report(logits, tokens, rows, wishes.numbers, (wishes.near, wishes.near_ids))
        return Chosen(tokens, report, extras.numbers[rows.long(), MU] if wishing == EXTRA else None)


def single_steps(
    model: Decoder,
    memory: BlockMemory,
    max_num_seqs: int,
    num_processors: int,
    eager: bool,
    deterministic: bool = False,
) -> SingleSteps:
    """All that steps of single tokens read and write, on the memory's device."""
    spec = model.spec
    width = -(-spec.max_model_len // memory.block_size)
    rows = RowTensors(
        max_num_seqs, len(memory.grouping.groups), width, spec.vocab_size, spec.max_model_len, memory.blocks.device
    )
    heads = [(layer.attention.num_heads, *shape) for layer, shape in zip(spec.layers, spec.kv_shapes()) if shape]
    of = exact_tile_tokens if deterministic else tile_tokens
    tile = min(of(num_heads, num_kv_heads) for num_heads, num_kv_heads, _ in heads)
    return SingleSteps(
        model,
        memory.layer_caches(spec.kv_shapes()),
        rows,
        memory.block_size,
        max_num_seqs,
        tile,
        num_processors,
        eager,
        deterministic,
    )
