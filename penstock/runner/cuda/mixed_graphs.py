"""Mixed steps as CUDA graphs, for buckets of tokens and sequences; others are launched kernel by kernel."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch

from penstock.ops.triton.tuning import CAPTURE_AFTER, CAPTURED_TOKENS, MIXED_SEQUENCES, max_captured_tokens
from penstock.runner.cuda.decode_graphs import VARIANTS, DecodeGraphs, SampledTokens
from penstock.runner.cuda.graphs import Half
from penstock.runner.cuda.packed import MixedInputs, MixedShape, PackedRows, find_lengths, read_inputs
from penstock.runner.cuda.staging import Staging
from penstock.sampling.row import Chooser

Key = tuple[int, int]  # tokens, sequences
MAX_PADDING = 2  # times the tokens of a step; launching more padding takes longer than launching kernels one by one
SMALL_STEP = 256  # tokens, up to which a step's time is that of reading the weights
MAX_FEW_TOKENS = 512  # of steps with few sequences; in larger ones room for more costs little


def token_buckets(most: int) -> list[int]:
    """Token counts up to `most` for which mixed steps are captured."""
    sizes = [*range(16, 128, 16), *range(128, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 256)]
    sizes += range(4096, CAPTURED_TOKENS[1] + 1, 512)
    return [size for size in sizes if size <= most]


def sequence_buckets(max_num_seqs: int) -> list[int]:
    return [*(size for size in MIXED_SEQUENCES if size < max_num_seqs), max_num_seqs]


@dataclass
class MixedStep:
    """One bucket: its inputs, its forward pass and its variants of sampling."""

    shape: MixedShape
    flat: torch.Tensor
    forward: Half[torch.Tensor]
    sample: dict[Chooser, Half[SampledTokens]]


class MixedGraphs:
    """The step of each bucket. It shares tensors, memory and captures with the decode steps."""

    def __init__(self, decode: DecodeGraphs, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.decode, self.pool = decode, decode.pool
        most = min(max_num_batched_tokens, max_captured_tokens(decode.model.spec.num_parameters))
        self.tokens, self.sequences = token_buckets(most), sequence_buckets(max_num_seqs)
        self.num_wanted: Counter[Key] = Counter()  # while it was not captured
        self._known: dict[Key, MixedStep] = {}
        self._by_tokens = {size: [key for key in self.buckets() if key[0] == size] for size in self.tokens}
        sizes = [self.make_shape(key).num_numbers for key in self.buckets()] if self.tokens else [0]
        self._flat = torch.zeros(max(sizes), dtype=torch.int32, device=decode.rows.last.device)

    def buckets(self) -> list[Key]:
        """All buckets, the largest first: what is captured later fits into the memory of the first."""
        return [
            (tokens, seqs)
            for place, seqs in enumerate(self.sequences)
            for tokens in reversed(self.tokens)
            if seqs <= tokens and (tokens <= MAX_FEW_TOKENS or place or len(self.sequences) == 1)
        ]

    def make_shape(self, key: Key) -> MixedShape:
        """The inputs of a bucket. One more sequence has no queries: padding tiles are its."""
        tokens, seqs = key
        return MixedShape(tokens, seqs + 1, seqs, seqs, -(-tokens // self.decode.tile_tokens) + seqs, is_padded=True)

    def pick(self, num_tokens: int, num_sequences: int) -> Key | None:
        """Pick the step with the least room that is captured. If there is none that is not much larger, pick one to be
        captured; None if it has too many tokens for that."""
        if self.pool.eager or not self.tokens or num_tokens > self.tokens[-1]:
            return None
        largest = max(MAX_PADDING * num_tokens, SMALL_STEP)
        tokens = [size for size in self.tokens[bisect_left(self.tokens, num_tokens) :] if size <= largest]
        roomy = [key for size in tokens for key in self._by_tokens[size] if num_sequences <= key[1]]
        if not roomy:
            return None
        if self._is_captured(roomy[0]):
            return roomy[0]
        self.num_wanted[roomy[0]] += 1
        if not self.pool.has_idle_moments and self.num_wanted[roomy[0]] > CAPTURE_AFTER:
            return roomy[0]
        return next(filter(self._is_captured, roomy), roomy[0] if self.pool.can_capture else None)

    def _is_captured(self, key: Key) -> bool:
        return key in self._known and self._known[key].forward.graph is not None

    def __getitem__(self, key: Key) -> MixedStep:
        if key not in self._known:
            shape = self.make_shape(key)
            flat = self._flat[: shape.num_numbers]
            forward = Half(partial(self._forward, shape, flat), is_forward=True)
            sample = {chooser: Half(partial(self._sample, forward, shape, flat, chooser)) for chooser in VARIANTS}
            self._known[key] = MixedStep(shape, flat, forward, sample)
        return self._known[key]

    def _num_kv_splits(self, num_sequences: int) -> int:
        """As for long contexts of half the sequences: decode rows are few or many, and their contexts short or long.
        Deterministic splits would have to be enough for the longest there can be."""
        if self.decode.deterministic:
            return 1
        return self.decode.num_kv_splits(max(1, num_sequences // 2), self.decode.model.spec.max_model_len)

    def _forward(self, shape: MixedShape, flat: torch.Tensor) -> torch.Tensor:
        decode, num_kv_splits = self.decode, self._num_kv_splits(shape.num_single)
        inputs = read_inputs(flat, shape, decode.rows, decode.memory.block_size, num_kv_splits, None, None)
        inputs.add_ends(num_kv_splits)
        hidden = decode.compute(inputs.step)
        return decode.model.logits(hidden, adapters=inputs.end_adapters)

    def _sample(
        self, forward: Half[torch.Tensor], shape: MixedShape, flat: torch.Tensor, chooser: Chooser
    ) -> SampledTokens:
        assert forward.made is not None
        return self._sample_logits(forward.made, shape, flat, chooser)

    def _sample_logits(
        self, logits: torch.Tensor, shape: MixedShape, flat: torch.Tensor, chooser: Chooser
    ) -> SampledTokens:
        given = shape.split(flat)
        lengths = find_lengths(given.positions.long(), given.at.long())
        return self.decode.sample(logits, lengths, given.at_rows, chooser)

    def send(self, staging: Staging, packed: PackedRows, key: Key) -> MixedStep:
        """Send the rows as the inputs of a bucket."""
        one = self[key]
        packed.fill(staging.take(), one.shape, self.decode.rows.padding_row)
        staging.send(one.shape.num_numbers, one.flat)
        return one

    def send_alone(self, staging: Staging, packed: PackedRows) -> MixedInputs:
        """Send rows that no captured step has room for."""
        shape, decode = packed.shape, self.decode
        packed.fill(staging.take(), shape, decode.rows.padding_row)
        flat = staging.send(shape.num_numbers)
        size = decode.memory.block_size
        splits = decode.num_kv_splits(packed.num_single, packed.longest)
        return read_inputs(flat, shape, decode.rows, size, splits, -(-packed.longest // size), packed.longest_prompt)

    def prepare(self, key: Key, chooser: Chooser) -> None:
        """Run a bucket of padding rows, and capture it."""
        one = self[key]
        fill_padding(one.flat, one.shape, self.decode.rows.padding_row)
        self.pool.prepare(one.forward, one.sample[chooser])

    def warm(self, key: Key, chooser: Chooser) -> None:
        """Run a bucket of padding rows, so that its kernels are compiled; safe to call from several threads."""
        shape = self.make_shape(key)
        with torch.inference_mode():
            flat = torch.empty(shape.num_numbers, dtype=torch.int32, device=self.decode.rows.last.device)
            fill_padding(flat, shape, self.decode.rows.padding_row)
            self._sample_logits(self._forward(shape, flat), shape, flat, chooser)

    def forget(self) -> None:
        self._known.clear()


def fill_padding(flat: torch.Tensor, shape: MixedShape, padding_row: int) -> None:
    """Write the inputs of a step that has no rows."""
    flat.zero_()
    to = shape.split(flat)
    to.positions[:], to.rows[:], to.at[:], to.at_rows[:] = -1, padding_row, -1, padding_row
