"""What rows ask of their sampling beyond a temperature, as the device knows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.ops.wishes import MOST_BIASED, MOST_COUNTED, make_wishes
from penstock.runner.cuda.staging import sent
from penstock.sampling.row import RowState


class WishRows:
    """Entries of `num_rows` rows and one more that is nobody's; an entry is written when its row is taken, and its
    words whenever other tokens are allowed."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.tensors = make_wishes(num_rows + 1, vocab_size, device)
        self._size, self._device = vocab_size, device
        self._asking: set[int] = set()            # rows whose entries ask for anything
        self._stages: dict[int, int] = {}         # of the words that a row's entry holds

    def admit(self, rows: Sequence[tuple[int, RowState]]) -> None:
        changed = [(row, state) for row, state in rows if row in self._asking or not state.simple]
        if not changed:
            return
        entries = sent([row for row, _ in changed], self._device)
        numbers = sent([state.wishes() for _, state in changed], self._device)
        self.tensors.numbers[entries, :numbers.shape[1]] = numbers
        for row, state in changed:
            self._stages.pop(row, None)
            if state.simple:
                self._asking.discard(row)
                continue
            self._asking.add(row)
            if len(state.bias[0]):
                self._enter_bias(row, *state.bias)
            if state.penal:
                self.tensors.counts[row] = sent(self._counted(state), self._device)

    def _enter_bias(self, row: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Ids past the end of the vocabulary match no token."""
        self.tensors.biased[row, :len(ids)] = sent(ids[:MOST_BIASED].astype(np.int32), self._device)
        self.tensors.bias[row, :len(ids)] = sent(values[:MOST_BIASED], self._device)

    def _counted(self, state: RowState) -> np.ndarray:
        prompt, generated = state.tokens[:state.num_prompt], state.tokens[state.num_prompt:]
        counts = 2 * np.bincount(np.array(generated, dtype=np.int64), minlength=self._size)[:self._size]
        counts[[token for token in set(prompt) if token < self._size]] += 1
        return np.minimum(counts, MOST_COUNTED).astype(np.int16)

    def allow(self, rows: Sequence[tuple[int, RowState, int]]) -> None:
        """Enter which tokens may come next in those rows, given with how many they have generated, where that is not
        what their entries hold."""
        entries, words = [], []
        for row, state, num_generated in rows:
            stage = state.stage(num_generated)
            if state.masked and (state.late or self._stages.get(row) != stage):
                entries.append(row)
                words.append(state.words(num_generated, self._size))
                self._stages[row] = stage
        if entries:
            self.tensors.words[sent(entries, self._device)] = sent(np.stack(words), self._device)

    def count(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Tokens that the host chose for rows with penalties."""
        if rows:
            index = sent(list(rows), self._device), sent(list(tokens), self._device)
            self.tensors.counts.index_put_(index, self.tensors.counts.new_tensor(2), accumulate=True)
