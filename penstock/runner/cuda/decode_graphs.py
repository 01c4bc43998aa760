"""Decode steps: captured as CUDA graphs, one for each bucket of batch sizes, and replayed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from penstock import ops
from penstock.layers import KvCache
from penstock.models.decoder import Decoder
from penstock.models.memory import KvMemory, LatentMemory, Memory
from penstock.ops.attention.inputs import NUM_COMMON, ROW
from penstock.ops.sampling.extras import MU
from penstock.ops.triton.attention.attention import tile_tokens
from penstock.ops.triton.attention.latent import tile_tokens as latent_tile_tokens
from penstock.ops.triton.exact.attention import count_splits
from penstock.ops.triton.exact.attention import tile_tokens as exact_tile_tokens
from penstock.ops.triton.tuning import (
    CAPTURE_AFTER,
    MAX_KV_SPLITS,
    MAX_PREFIX_SPLITS,
    MAX_SHORT_KV_SPLITS,
    MIN_PREFIX_SEQUENCES,
    SHORT_CONTEXT,
)
from penstock.passes.adapt import AdaptedEmbedding
from penstock.runner.cuda.decode_batch import max_tiles
from penstock.runner.cuda.graphs import GraphPool, Half
from penstock.runner.cuda.rows import RowTensors
from penstock.runner.memory import BlockMemory
from penstock.runner.step import Step
from penstock.sampling.row import Chooser

if TYPE_CHECKING:
    from penstock.runner.cuda.drafting.features import Features

Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)
VARIANTS = Chooser.DEVICE, Chooser.DEVICE_FILTERED, Chooser.DEVICE_EXTRAS  # of sampling
Key = tuple[int, bool, int]  # batch size, whether prefixes are shared, KV splits


@dataclass(frozen=True)
class SampledTokens:
    """Tokens [S], their log probabilities if any row wants some, and mirostat's mu after them."""

    tokens: torch.Tensor
    report: torch.Tensor | None = None
    mus: torch.Tensor | None = None


@dataclass
class DecodeStep:
    """One bucket: its inputs, its forward pass and its variants of sampling."""

    flat: torch.Tensor  # all inputs, `numbers` first
    numbers: torch.Tensor
    step: Step
    forward: Half[torch.Tensor]
    sample: dict[Chooser, Half[SampledTokens]]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes for which decode steps are captured; others are padded to the next of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def num_kv_splits(num_single: int, longest: int, num_kv_heads: int, num_sms: int) -> int:
    """KV splits of decode attention: enough to occupy every SM; two at least for long contexts, so that no SM has
    twice the work of another."""
    wanted, each = 2 * num_sms, max(1, num_single * num_kv_heads)
    if longest <= SHORT_CONTEXT:
        return max(1, min(MAX_SHORT_KV_SPLITS, wanted // each))
    return max(1 + (each < wanted), min(MAX_KV_SPLITS, wanted // each))


def num_prefix_splits(num_sequences: int, tile_tokens: int, num_kv_heads: int, num_sms: int) -> int:
    """KV splits of shared prefixes: enough to occupy every SM; a power of 2, so that fewer kernels are compiled."""
    each = num_sms // (-(-num_sequences // tile_tokens) * num_kv_heads)
    return 1 << (max(1, min(MAX_PREFIX_SPLITS, each)).bit_length() - 1)


class DecodeGraphs:
    """The step of each bucket. All read and write the same tensors; each is captured once it has run."""

    def __init__(
        self,
        model: Decoder,
        memory: BlockMemory,
        rows: RowTensors,
        max_num_seqs: int,
        tile_tokens: int,
        num_sms: int,
        eager: bool,
        deterministic: bool,
    ) -> None:
        self.model, self.memory, self.rows = model, memory, rows
        self.caches = self.view_caches()
        self.features: Features | None = None
        self.groups: Sequence[int] = range(len(rows.tables))
        self.sizes = bucket_sizes(max_num_seqs)
        self.deterministic = deterministic
        device = rows.last.device
        self.num_sms = num_sms
        self._kv_heads = max((cache.k.shape[1] for cache in self.caches if isinstance(cache, KvCache)), default=1)
        num_groups = len(rows.tables)
        self.num_numbers = NUM_COMMON + 2 * num_groups
        self.tile_tokens = tile_tokens  # queries of one sequence, or sequences of one shared prefix
        self._numbers = torch.zeros(self.num_flat(max_num_seqs, True), dtype=torch.int32, device=device)
        whole = torch.int64
        self._ids = torch.zeros(max_num_seqs, dtype=whole, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=whole, device=device)
        self._slots = [
            torch.zeros(max_num_seqs, dtype=whole, device=device) if has_slots else None for has_slots in rows.has_slots
        ]
        self._tables = [
            torch.full((max_num_seqs, table.shape[1]), -1, dtype=torch.int32, device=device) for table in rows.tables
        ]
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._known: dict[Key, DecodeStep] = {}
        self.num_wanted: Counter[Key] = Counter()  # and not captured
        self.pool = GraphPool(eager, max_num_seqs)

    def warm(self, size: int, shared: bool = False, chooser: Chooser = Chooser.DEVICE, longest: int = 1) -> None:
        """Run a step of padding rows, so that its kernels are compiled; safe to call from several threads."""
        with torch.inference_mode():
            one = self._make(
                torch.zeros(self.num_flat(size, shared), dtype=torch.int32, device=self.rows.last.device),
                size,
                shared,
                self.num_kv_splits(size, longest),
            )
            one.numbers.fill_(-1)
            one.numbers[ROW] = self.rows.padding_row
            self.sample(self._forward(one.numbers, one.step), one.step.lengths, one.numbers[ROW], chooser)

    def view_caches(self) -> list[Any]:
        return self.memory.views(self.model.spec.memories())

    def num_kv_splits(self, num_single: int, longest: int) -> int:
        if self.deterministic:
            return count_splits(num_single, longest, self._kv_heads)
        return num_kv_splits(num_single, longest, self._kv_heads, self.num_sms)

    def num_prefix_splits(self, size: int) -> int:
        return num_prefix_splits(size, self.tile_tokens, self._kv_heads, self.num_sms)

    def size(self, num_sequences: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_sequences)]

    def pick(self, num_sequences: int, shared: bool, longest: int) -> Key:
        """Pick the step for so many sequences. A rare batch size takes the next larger captured one with padding rows:
        capturing it would not pay, and launching it kernel by kernel is slow."""
        least = self.size(num_sequences)
        right = least, shared, self.num_kv_splits(least, longest)
        if self.pool.eager or self._is_captured(right):
            return right
        self.num_wanted[right] += 1
        if not self.pool.has_idle_moments and self.num_wanted[right] > CAPTURE_AFTER:
            return right
        larger = ((size, shared, self.num_kv_splits(size, longest)) for size in self.sizes if size > least)
        return next((key for key in larger if self._is_captured(key)), right)

    def _is_captured(self, key: Key) -> bool:
        return key in self._known and self._known[key].forward.graph is not None

    def num_flat(self, size: int, shared: bool) -> int:
        """Numbers that are sent: the rows', and those of shared prefixes."""
        return self.num_numbers * size + (2 * size + 4 * max_tiles(size, self.tile_tokens) if shared else 0)

    def split(self, flat: Numbers, size: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Views of the rows' numbers and of shared prefixes' members, skips and tiles, which may be empty."""
        end = self.num_numbers * size
        return (
            flat[:end].reshape(self.num_numbers, size),
            flat[end : end + size],
            flat[end + size : end + 2 * size],
            flat[end + 2 * size :].reshape(-1, 4),
        )

    def forget(self) -> None:
        """Drop all captured graphs."""
        self._known.clear()
        self.pool.forget()

    def __getitem__(self, key: Key) -> DecodeStep:
        if key not in self._known:
            self._known[key] = self._make(self._numbers[: self.num_flat(*key[:2])], *key)
        return self._known[key]

    def _make(self, flat: torch.Tensor, size: int, is_shared: bool, num_kv_splits: int) -> DecodeStep:
        numbers, members, skips, tiles = self.split(flat, size)
        shared = ops.Shared(members, skips, tiles, self.num_prefix_splits(size)) if is_shared else None
        step = Step(
            self._ids[:size],
            self._positions[:size],
            [slots if slots is None else slots[:size] for slots in self._slots],
            [table[:size] for table in self._tables],
            self._starts[: size + 1],
            self._lengths[:size],
            ops.Work(size, None, num_kv_splits, shared),
        )
        forward = Half(partial(self._forward, numbers, step), is_forward=True)
        sample = {chooser: Half(partial(self._sample, forward, step, numbers[ROW], chooser)) for chooser in VARIANTS}
        return DecodeStep(flat, numbers, step, forward, sample)

    def prepare(self, key: Key, chooser: Chooser) -> None:
        """Run a bucket of padding rows, and capture it."""
        one = self[key]
        one.flat.zero_()
        one.numbers.fill_(-1)
        one.numbers[ROW] = self.rows.padding_row
        self.pool.prepare(one.forward, one.sample[chooser])

    def buckets(self) -> list[Key]:
        """All buckets, the largest first, those without shared prefixes before the others."""
        shared = (False, True) if self.rows.only_full and not self.deterministic else (False,)
        most = self.model.spec.max_model_len
        lengths = [min(SHORT_CONTEXT, most), most]
        if self.deterministic:  # as many splits as the longest sequence has
            lengths = [length for power in range(most.bit_length() + 1) if (length := min(1 << power, most))]
        found = [
            (size, is_shared, self.num_kv_splits(size, length))
            for is_shared in shared
            for length in lengths
            for size in reversed(self.sizes)
            if not is_shared or size >= MIN_PREFIX_SEQUENCES
        ]
        return list(dict.fromkeys(found))

    def _forward(self, numbers: torch.Tensor, step: Step) -> torch.Tensor:
        for g in self.groups:
            self.model.ops.single_inputs(
                numbers,
                self.rows.last,
                self.rows.tables[g],
                g,
                self.memory.block_size,
                step.ids,
                step.positions,
                step.lengths,
                step.slots[g],
                step.tables[g],
            )
        step.adapters = self.rows.find_adapters(numbers[ROW].long())
        return self.model.logits(self.compute(step), adapters=step.adapters)

    def compute(self, step: Step) -> torch.Tensor:
        """Hidden states of a step's tokens, or of `step.ends` alone; what a drafting model reads of them is kept."""
        if self.features is None:
            return self.model.forward(step, self.caches)
        return self.features.compute(self.model, step, self.caches)

    def _sample(self, forward: Half[torch.Tensor], step: Step, rows: torch.Tensor, chooser: Chooser) -> SampledTokens:
        assert forward.made is not None
        return self.sample(forward.made, step.lengths, rows, chooser)

    def sample(
        self, logits: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, chooser: Chooser
    ) -> SampledTokens:
        """Sample a token from each row of logits, of sequences of these lengths."""
        known, row_params, extras = self.rows, self.rows.params.tensors, self.rows.params.extras
        tokens = self.model.ops.sample(
            logits,
            known.temperature,
            known.keys,
            lengths.int(),
            rows,
            known.last,
            row_params if chooser > Chooser.DEVICE else None,
            extras if chooser is Chooser.DEVICE_EXTRAS else None,
        )
        if chooser <= Chooser.DEVICE:
            return SampledTokens(tokens)
        report = self.model.ops.report(
            logits, tokens, rows, row_params.numbers, (row_params.candidates, row_params.candidate_ids)
        )
        return SampledTokens(
            tokens, report, extras.numbers[rows.long(), MU] if chooser is Chooser.DEVICE_EXTRAS else None
        )


def make_decode_graphs(
    model: Decoder, memory: BlockMemory, max_num_seqs: int, num_sms: int, eager: bool, deterministic: bool = False
) -> DecodeGraphs:
    """Make all that decode steps read and write, on the memory's device."""
    spec = model.spec
    rows = RowTensors(
        max_num_seqs,
        memory.grouping.groups,
        memory.block_size,
        spec.vocab_size,
        spec.max_model_len,
        memory.blocks.device,
        isinstance(model.embedding, AdaptedEmbedding),
    )
    tiles = find_tile_tokens(spec.memories(), memory.blocks.device, deterministic)
    return DecodeGraphs(model, memory, rows, max_num_seqs, tiles, num_sms, eager, deterministic)


def find_tile_tokens(memories: Sequence[Memory | None], device: torch.device, deterministic: bool) -> int:
    """The queries of one sequence that attention over any of these memories takes at once."""
    of = exact_tile_tokens if deterministic else tile_tokens
    tiles = [of(one.num_heads, one.num_kv_heads) for one in memories if isinstance(one, KvMemory)]
    tiles += [latent_tile_tokens(one.num_heads, device) for one in memories if isinstance(one, LatentMemory)]
    return min(tiles, default=of(1, 1))
