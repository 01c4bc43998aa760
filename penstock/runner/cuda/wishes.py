"""What rows ask of their sampling beyond a temperature, as the device knows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.ops.extras import OFF, make_extras
from penstock.ops.wishes import MOST_BIASED, MOST_COUNTED, make_wishes
from penstock.runner.cuda.staging import sent
from penstock.sampling.dry import breaking
from penstock.sampling.grammar import GrammarFailed
from penstock.sampling.row import RowState


class WishRows:
    """Entries of `num_rows` rows and one more that is nobody's; an entry is written when its row is taken, and its
    words whenever other tokens are allowed."""

    def __init__(self, num_rows: int, vocab_size: int, max_tokens: int, device: torch.device) -> None:
        self.tensors = make_wishes(num_rows + 1, vocab_size, device)
        self.extras = make_extras(num_rows + 1, vocab_size, max_tokens, device)
        self._size, self._device = vocab_size, device
        self._asking: set[int] = set()  # rows whose entries ask for anything
        self._extra: set[int] = set()  # rows whose entries ask for rarer samplers
        self._stages: dict[int, int] = {}  # of the words that a row's entry holds
        self._miscounted: set[int] = set()  # rows whose counts are not those of their texts
        self._words: dict[int, np.ndarray] = {}  # of rows, not sent yet

    def admit(self, rows: Sequence[tuple[int, RowState]]) -> None:
        changed = [(row, state) for row, state in rows if row in self._asking or state.asks_device]
        if not changed:
            return
        entries = sent([row for row, _ in changed], self._device)
        numbers = sent([state.wishes() for _, state in changed], self._device)
        self.tensors.numbers[entries, : numbers.shape[1]] = numbers
        for row, state in changed:
            self._stages.pop(row, None)
            self._words.pop(row, None)
            self._miscounted.discard(row)
            self._enter_extras(row, state)
            if not state.asks_device:
                self._asking.discard(row)
                continue
            self._asking.add(row)
            if len(state.bias[0]):
                self._enter_bias(row, *state.bias)
            if state.penal:
                self._enter_counts(row, state)

    def _enter_bias(self, row: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Ids past the end of the vocabulary match no token."""
        self.tensors.biased[row, : len(ids)] = sent(ids[:MOST_BIASED].astype(np.int32), self._device)
        self.tensors.bias[row, : len(ids)] = sent(values[:MOST_BIASED], self._device)

    def _enter_counts(self, row: int, state: RowState) -> None:
        first = state.counted_from
        prompt, generated = state.tokens[first : state.num_prompt], state.tokens[max(first, state.num_prompt) :]
        counts = 2 * np.bincount(np.array(generated, dtype=np.int64), minlength=self._size)[: self._size]
        counts[[token for token in set(prompt) if token < self._size]] += 1
        self.tensors.counts[row] = sent(np.minimum(counts, MOST_COUNTED).astype(np.int16), self._device)

    def _enter_extras(self, row: int, state: RowState) -> None:
        """Write a row's parameters for the rarer samplers, and its tokens where they look back on them."""
        if not state.asks_extras:
            if row in self._extra:
                self._extra.discard(row)
                self.extras.numbers[row] = sent(list(OFF), self._device)
            return
        self._extra.add(row)
        self.extras.numbers[row] = sent(state.extras(), self._device)
        if state.samplers.dry is None and not state.asks_window:
            return
        width = self.extras.history.shape[1]
        first = max(0, len(state.tokens) - width)
        text = np.array(state.tokens[first:], dtype=np.int64)
        bits = breaking(state.request.dry_breakers, self._size)
        text = np.where(bits[np.minimum(text, self._size - 1)], -1 - text, text).astype(np.int32)
        places = np.arange(first, len(state.tokens)) % width
        self.extras.history[row, sent(places, self._device)] = sent(text, self._device)
        words = np.packbits(bits, bitorder="little")
        words = np.concatenate((words, np.zeros(-len(words) % 4, dtype=np.uint8))).view(np.int32)
        self.extras.breakers[row] = sent(words.copy(), self._device)

    def allow(self, row: int, state: RowState, num_generated: int) -> bool:
        """The device chooses a row's next token, after so many generated ones: which it may be, where that is not what
        the row's entry holds, is entered by `send`. False if that cannot be told."""
        stage = state.stage(num_generated)
        if state.masked and (state.late_at(num_generated) or self._stages.get(row) != stage):
            try:
                self._words[row] = state.words(num_generated, self._size)
            except GrammarFailed:
                return False
            self._stages[row] = stage
        if row in self._miscounted:
            self._miscounted.discard(row)
            if state.penal:
                self._enter_counts(row, state)
            self._enter_extras(row, state)
        return True

    def leave(self, row: int, state: RowState) -> None:
        """The host chooses a row's next token; what the device chooses beside it is counted all the same."""
        if state.asks_device and (state.penal or state.asks_extras):
            self._miscounted.add(row)

    def send(self) -> None:
        if self._words:
            entries, words = list(self._words), list(self._words.values())
            self._words = {}
            self.tensors.words[sent(entries, self._device)] = sent(np.stack(words), self._device)
