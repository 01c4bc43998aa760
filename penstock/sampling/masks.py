"""Edits to single logits: logit_bias, bad_words, min_tokens and allowed_token_ids.

Ids past the end of the vocabulary are ignored.
Bitmasks of 32-bit words are the form a device reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.sampling.logits import Array
from penstock.types import Request


def allow_all(size: int) -> Array:
    return np.full(-(-size // 32), -1, dtype=np.int32)


def allow_none(size: int) -> Array:
    return np.zeros(-(-size // 32), dtype=np.int32)


def allow(bitmask: Array, ids: Array) -> None:
    """Set the bits of `ids`; ids past the end are ignored."""
    ids = ids[ids < 32 * len(bitmask)]
    np.bitwise_or.at(bitmask.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))


def forbid(bitmask: Array, ids: Array) -> None:
    ids = ids[ids < 32 * len(bitmask)]
    np.bitwise_and.at(bitmask.view(np.uint32), ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))


NEVER = np.float32(-np.inf)
MAX_VOCAB = 1 << 24  # above any vocabulary; float32 counts to it exactly


def _ids(tokens: Sequence[int]) -> Array:
    """Keep the ids that a vocabulary may contain."""
    return np.array([token for token in tokens if token < MAX_VOCAB], dtype=np.int64)


class Masks:
    """One request's biases and token masks, as arrays made once."""

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        bias = {token: value for token, value in (sampling.logit_bias or {}).items() if token < MAX_VOCAB}
        self._biased, self._bias = _ids(list(bias)), np.array(list(bias.values()), dtype=np.float32)
        self._allowed = None if sampling.allowed_token_ids is None else _ids(sampling.allowed_token_ids)
        self._stops = _ids(request.stop_token_ids)
        self._min_tokens = sampling.min_tokens if len(self._stops) else 0
        self._bad_words = [(list(word[:-1]), word[-1]) for word in request.bad_words if word]
        self._always = bool(bias) or self._allowed is not None or bool(self._bad_words)

    @property
    def is_ever_active(self) -> bool:
        return self._always or self._min_tokens > 0

    @property
    def bias(self) -> tuple[Array, Array]:
        """Biased ids, and the bias of each."""
        return self._biased, self._bias

    @property
    def forbids(self) -> bool:
        """True if any token is ever ruled out."""
        return self._allowed is not None or bool(self._bad_words) or self._min_tokens > 0

    @property
    def depends_on_last(self) -> bool:
        """True if the mask depends on the last token."""
        return any(start for start, _ in self._bad_words)

    def stage(self, num_generated: int) -> int:
        """Return the stage at this length; the bitmask is constant per stage unless `depends_on_last`."""
        return int(num_generated < self._min_tokens)

    def bitmask(self, tokens: list[int], num_prompt: int, num_generated: int, size: int) -> Array:
        """Return the bitmask of allowed tokens; `tokens` is the whole text, where it matters."""
        words = allow_all(size) if self._allowed is None else allow_none(size)
        if self._allowed is not None:
            allow(words, self._allowed)
        forbid(
            words,
            self._bad_ends(tokens, num_prompt) if self.depends_on_last else _ids([end for _, end in self._bad_words]),
        )
        if num_generated < self._min_tokens:
            forbid(words, self._stops)
        return words

    def is_active(self, num_generated: int) -> bool:
        return self._always or num_generated < self._min_tokens

    def apply(self, logits: Array, tokens: list[int], num_prompt: int) -> None:
        """Edit one row in place; `tokens` is the whole text so far."""
        known = self._biased < len(logits)
        logits[self._biased[known]] += self._bias[known]
        _forbid(logits, self._bad_ends(tokens, num_prompt))
        if len(tokens) - num_prompt < self._min_tokens:
            _forbid(logits, self._stops)
        if self._allowed is not None:
            forbidden = np.ones(len(logits), dtype=bool)
            forbidden[self._allowed[self._allowed < len(logits)]] = False
            logits[forbidden] = NEVER

    def _bad_ends(self, tokens: list[int], num_prompt: int) -> Array:
        """Return the last token of each bad word whose other tokens were just generated."""
        num = len(tokens)
        return _ids(
            [
                end
                for start, end in self._bad_words
                if len(start) <= num - num_prompt and tokens[num - len(start) :] == start
            ]
        )


def _forbid(logits: Array, ids: Array) -> None:
    logits[ids[ids < len(logits)]] = NEVER
