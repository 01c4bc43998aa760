"""One answer's state in its grammar: tokens that may follow, and whether it may end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.sampling.grammar.lexicon import Lexicon
from penstock.sampling.logits import Array, NothingAllowed
from penstock.sampling.masks import NEVER, allow, allow_all, allow_none, forbid

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_REASON_CHARS = 300
MAX_MASKS_S = 2.0  # per answer, plus MASK_S for each of its tokens
MASK_S = 0.02


class GrammarFailed(NothingAllowed):
    """llguidance cannot continue this answer: one of its limits, or a token that does not match."""


def reason(text: str) -> str:
    """Return llguidance's message on one line, shortened."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."


class GrammarMatcher:
    """`ends` are the ids that end the answer without being text; `never` are ids that may never come."""

    def __init__(self, start: LLMatcher, lexicon: Lexicon, ends: Sequence[int] = (), never: Sequence[int] = ()) -> None:
        self.lexicon = lexicon
        self.ends = tuple(dict.fromkeys(ends))
        self._never = np.array([*self.ends, *never], dtype=np.int64)
        self._ends = np.array(self.ends, dtype=np.int64)
        self._start = start
        self.matcher = start.deep_copy()
        self._tokens: list[int] = []
        self._mask_s = 0.0  # total over all masks
        self._num_after = 0  # tokens since the end token, including it
        self._bits = np.zeros(lexicon.mask_words, dtype=np.int32)

    @property
    def may_end(self) -> bool:
        """True if the text so far is a complete match."""
        return self._num_after > 0 or self.matcher.is_accepting()

    @property
    def complete(self) -> bool:
        """True if nothing can follow a complete match."""
        return self._num_after > 0 or self.matcher.is_stopped() and self.matcher.is_accepting()

    def bitmask(self, size: int) -> Array:
        """Return the bitmask of `size` tokens that may come next."""
        if self._num_after:
            return allow_all(size)
        self._compute_bits()
        words = allow_none(size)
        known = min(len(words), len(self._bits))
        words[:known] = self._bits[:known]
        forbid(words, np.arange(self.lexicon.size, self.lexicon.size + 32))
        forbid(words, self._never)
        if self.matcher.is_accepting():
            allow(words, self._ends)
        return words

    def _compute_bits(self) -> None:
        """Compute the mask under a time limit per answer: other rows share the step."""
        self._check()
        begin = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._mask_s += time.thread_time() - begin
        self._check()
        if self._mask_s > MAX_MASKS_S + MASK_S * len(self._tokens):
            raise GrammarFailed(
                f"the grammar is too slow: {self._mask_s:.1f} s for {len(self._tokens) + 1} tokens; give a simpler one"
            )

    def mask(self, logits: Array) -> None:
        """Set the logits of tokens that may not come next to -inf, in place."""
        if self._num_after:
            return
        self._compute_bits()
        ends = self._ends[self._ends < len(logits)]
        kept = logits[ends]
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: min(len(logits), self.lexicon.size)]
        np.copyto(logits[: len(allowed)], NEVER, where=allowed == 0)
        logits[len(allowed) :] = NEVER
        logits[self._never[self._never < len(logits)]] = NEVER
        if self.matcher.is_accepting():
            logits[ends] = kept

    def forced_tokens(self) -> list[int]:
        """Return the tokens of the text that the grammar leaves no choice about; a model may spell it otherwise."""
        if self._num_after or self.matcher.is_error() or self.matcher.is_accepting():
            return []
        forced: list[int] = self.matcher.compute_ff_tokens()
        return forced

    def accepts(self, token: int) -> bool:
        if self._num_after or token in self.ends:
            return self.may_end
        return not self.matcher.is_error() and self.matcher.validate_tokens([token]) == 1

    def advance(self, token: int) -> None:
        if self._num_after or token in self.ends and self.matcher.is_accepting():
            self._num_after += 1
            return
        self._tokens.append(token)
        if not self.matcher.consume_token(token):
            self._check()

    def rollback(self, count: int) -> None:
        """Drop the last `count` tokens."""
        back = max(0, count - self._num_after)
        self._num_after = max(0, self._num_after - count)
        if not back:
            return
        del self._tokens[len(self._tokens) - back :]
        if self.matcher.is_error() or not self.matcher.rollback(back):  # errors are permanent
            self.matcher = self._start.deep_copy()
            self.matcher.consume_tokens(self._tokens)

    def _check(self) -> None:
        if self.matcher.is_error():
            raise GrammarFailed(f"the grammar cannot go on: {reason(self.matcher.get_error())}")
