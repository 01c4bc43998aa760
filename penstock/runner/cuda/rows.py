"""Device tensors of the rows: block tables, last tokens and sampling parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import numpy as np
import torch

from penstock.cache.group import Group
from penstock.engine.plan import Admission, Plan
from penstock.ops import AdapterRows
from penstock.ops.sampling.extras import OFF, make_extras
from penstock.ops.sampling.row_params import MAX_BIASED, MAX_COUNTED, make_row_params
from penstock.runner.cuda.staging import to_device
from penstock.runner.rows import pack_entries
from penstock.sampling.draw import WORD, philox
from penstock.sampling.grammar.matcher import GrammarFailed
from penstock.sampling.rare.dry import unpack_breakers
from penstock.sampling.row import Chooser, RowState

MIN_PARALLEL_MASKS = 4
MAX_MASK_THREADS = 8


class DeviceParams:
    """Entries of `num_rows` rows and one padding row. An entry is written at admission, its bitmask whenever other
    tokens are allowed."""

    def __init__(self, num_rows: int, vocab_size: int, max_tokens: int, device: torch.device) -> None:
        self.tensors = make_row_params(num_rows + 1, vocab_size, device)
        self.extras = make_extras(num_rows + 1, vocab_size, max_tokens, device)
        self._size, self._device = vocab_size, device
        self._with_params: set[int] = set()  # rows whose entries are not neutral
        self._with_extras: set[int] = set()  # rows that use the rarer samplers
        self._stages: dict[int, int] = {}  # of the words that a row's entry holds
        self._miscounted: set[int] = set()  # rows whose counts are not those of their tokens
        self._words: dict[int, np.ndarray] = {}  # of rows, not sent yet
        self._computed: dict[int, np.ndarray | GrammarFailed] = {}  # bitmasks for the next call of `allow`
        self._threads: ThreadPoolExecutor | None = None

    @property
    def is_counted(self) -> bool:
        """True if the counts of all rows are those of their tokens."""
        return not self._miscounted

    def admit(self, rows: Sequence[tuple[int, RowState]]) -> None:
        changed = [(row, state) for row, state in rows if row in self._with_params or state.has_device_params]
        if not changed:
            return
        entries = to_device([row for row, _ in changed], self._device)
        numbers = to_device([state.row_params() for _, state in changed], self._device)
        self.tensors.numbers[entries, : numbers.shape[1]] = numbers
        for row, state in changed:
            self._stages.pop(row, None)
            self._words.pop(row, None)
            self._miscounted.discard(row)
            self._enter_extras(row, state)
            if not state.has_device_params:
                self._with_params.discard(row)
                continue
            self._with_params.add(row)
            if len(state.masks.bias[0]):
                self._enter_bias(row, *state.masks.bias)
        self._enter_counts([(row, state) for row, state in changed if state.has_device_params and state.has_penalties])

    def _enter_bias(self, row: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Ids past the end of the vocabulary match no token."""
        self.tensors.biased[row, : len(ids)] = to_device(ids[:MAX_BIASED].astype(np.int32), self._device)
        self.tensors.bias[row, : len(ids)] = to_device(values[:MAX_BIASED], self._device)

    def _enter_counts(self, rows: Sequence[tuple[int, RowState]]) -> None:
        """Write the counts of some rows: two for each generated token, and one for a token of the prompt."""
        if not rows:
            return
        ids, counts = zip(*(self._count(state) for _, state in rows))
        where = np.repeat([row for row, _ in rows], [len(found) for found in ids])
        entries = to_device(np.stack((where, np.concatenate(ids), np.concatenate(counts))), self._device)
        self.tensors.counts[to_device([row for row, _ in rows], self._device)] = 0
        self.tensors.counts[entries[0], entries[1]] = entries[2].to(torch.int16)

    def _count(self, state: RowState) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that a row has, and their counts."""
        first = state.penalties.first
        prompt = np.unique(np.array(state.tokens[first : state.num_prompt], dtype=np.int64))
        generated, times = np.unique(
            np.array(state.tokens[max(first, state.num_prompt) :], dtype=np.int64), return_counts=True
        )
        found, places = np.unique(np.concatenate((prompt, generated)), return_inverse=True)
        counts = np.zeros(len(found), dtype=np.int64)
        counts[places[: len(prompt)]] += 1
        counts[places[len(prompt) :]] += 2 * times
        inside = found < self._size
        return found[inside], np.minimum(counts[inside], MAX_COUNTED)

    def _enter_extras(self, row: int, state: RowState) -> None:
        """Write a row's parameters for the rarer samplers, and its tokens where they look back on them."""
        if state.chooser is not Chooser.DEVICE_EXTRAS:
            if row in self._with_extras:
                self._with_extras.discard(row)
                self.extras.numbers[row] = to_device(list(OFF), self._device)
            return
        self._with_extras.add(row)
        self.extras.numbers[row] = to_device(state.extras(), self._device)
        if state.samplers.dry is None and not state.has_penalty_window:
            return
        width = self.extras.history.shape[1]
        first = max(0, len(state.tokens) - width)
        text = np.array(state.tokens[first:], dtype=np.int64)
        bits = unpack_breakers(state.request.dry_breakers, self._size)
        text = np.where(bits[np.minimum(text, self._size - 1)], -1 - text, text).astype(np.int32)
        places = np.arange(first, len(state.tokens)) % width
        self.extras.history[row, to_device(places, self._device)] = to_device(text, self._device)
        words = np.packbits(bits, bitorder="little")
        words = np.concatenate((words, np.zeros(-len(words) % 4, dtype=np.uint8))).view(np.int32)
        self.extras.breakers[row] = to_device(words.copy(), self._device)

    def compute_masks(self, rows: Sequence[tuple[int, RowState, int]]) -> None:
        """Compute the bitmasks of rows after so many generated tokens, several at once: llguidance leaves Python to
        other threads meanwhile."""
        self._computed = {}
        if len(rows) < MIN_PARALLEL_MASKS:
            return
        if self._threads is None:
            count = max(2, min(MAX_MASK_THREADS, (os.cpu_count() or 1) // 2))
            self._threads = ThreadPoolExecutor(count, "penstock-masks")
        numbers = [row for row, _, _ in rows]
        self._computed = dict(zip(numbers, self._threads.map(self._compute_mask, rows)))

    def _compute_mask(self, one: tuple[int, RowState, int]) -> np.ndarray | GrammarFailed:
        _, state, num_generated = one
        try:
            return state.words(num_generated, self._size)
        except GrammarFailed as error:
            return error

    def allow(self, row: int, state: RowState, num_generated: int) -> bool:
        """Prepare a row for sampling on the device after `num_generated` tokens; `send` writes its bitmask if that has
        changed. False if its grammar has failed."""
        stage = state.stage(num_generated)
        if state.has_mask and (state.is_mask_late(num_generated) or self._stages.get(row) != stage):
            words = self._computed.pop(row, None)
            if words is None:
                words = self._compute_mask((row, state, num_generated))
            if isinstance(words, GrammarFailed):
                return False
            self._words[row] = words
            self._stages[row] = stage
        if row in self._miscounted:
            self._miscounted.discard(row)
            if state.has_penalties:
                self._enter_counts([(row, state)])
            self._enter_extras(row, state)
        return True

    def skip(self, row: int, state: RowState) -> None:
        """Note that the host samples a row: the device counts a token of its own for it all the same."""
        if state.has_device_params and (state.has_penalties or state.chooser is Chooser.DEVICE_EXTRAS):
            self._miscounted.add(row)

    def send(self) -> None:
        if self._words:
            entries, words = list(self._words), list(self._words.values())
            self._words = {}
            self.tensors.words[to_device(entries, self._device)] = to_device(np.stack(words), self._device)


MAX_TEMPERATURE = 1e38  # that float32 holds


class RowTensors:
    """Last token, temperature, random key, other sampling parameters and blocks in each group, of `num_rows` rows and
    one padding row."""

    def __init__(
        self,
        num_rows: int,
        groups: Sequence[Group],
        block_size: int,
        vocab_size: int,
        max_tokens: int,
        device: torch.device,
        has_loras: bool = False,
    ) -> None:
        self.padding_row = num_rows
        self.last = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(num_rows + 1, device=device)
        self.keys = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        widths = [group.table_width(max_tokens, block_size) for group in groups]
        self.tables = [torch.zeros((num_rows + 1, width), dtype=torch.int32, device=device) for width in widths]
        self.has_slots = [group.is_paged for group in groups]
        self.only_full = all(group.spec.kind == "full" for group in groups)
        self.params = DeviceParams(num_rows, vocab_size, max_tokens, device)
        self._device = device
        self._adapters = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device) if has_loras else None

    def copy_for_drafts(self, keeps_adapters: bool) -> RowTensors:
        """Return the same rows with last tokens of their own: those drafted."""
        other = copy(self)
        other.last = torch.zeros_like(self.last)
        other._adapters = self._adapters if keeps_adapters else None
        return other

    def find_adapters(self, rows: torch.Tensor) -> AdapterRows | None:
        """Find the slots of the adapters of rows[T]; None if the engine has no adapters."""
        return None if self._adapters is None else AdapterRows(self._adapters[rows])

    def admit(self, admissions: Sequence[Admission], states: Sequence[RowState]) -> None:
        if not admissions:
            return
        self.params.admit([(admission.row, state) for admission, state in zip(admissions, states)])
        rows = to_device([admission.row for admission in admissions], self._device)
        if self._adapters is not None:
            adapters = np.array([admission.adapter for admission in admissions], dtype=np.int32)
            self._adapters[rows] = to_device(adapters, self._device)
        samplings = [admission.request.sampling for admission in admissions]
        self.temperature[rows] = to_device(
            [0.0 if sampling.greedy else min(float(sampling.temperature), MAX_TEMPERATURE) for sampling in samplings],
            self._device,
        )
        self.keys[rows] = to_device(
            [row_key(admission.request.seed, admission.sibling) for admission in admissions], self._device
        )

    def enter(self, plan: Plan) -> None:
        """Write all new blocks of a plan's rows."""
        for g, table in enumerate(self.tables):
            changed = [row for row in plan.rows if row.blocks and row.blocks[g]]
            if changed:
                rows = np.repeat([row.row for row in changed], [len(row.blocks[g]) for row in changed])
                where, indices, blocks = to_device(
                    np.vstack((rows, pack_entries([row.blocks[g] for row in changed]))), self._device
                )
                table[where, indices] = blocks.to(torch.int32)

    def set_last(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Write tokens that the host sampled."""
        if rows:
            self.last[to_device(rows, self._device)] = to_device(tokens, self._device)


def row_key(seed: int, sibling: int) -> int:
    """Random key of a request's sibling: 64 bits as a signed number."""
    high, low, _, _ = philox((sibling & WORD, 0, 0, 0), (seed & WORD, seed >> 32 & WORD))
    key = high << 32 | low
    return key - (1 << 64) if key >> 63 else key
