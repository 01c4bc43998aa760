"""Changes to logits that name tokens: logit_bias, and what bad_words, min_tokens and allowed_token_ids rule out.

Ids past the end of the vocabulary name nothing and are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.sampling.arrays import Array
from penstock.sampling.words import add, every_token, no_token, remove
from penstock.types import Request

NEVER = np.float32(-np.inf)
MOST_TOKENS = 1 << 24  # no vocabulary has more; float32 counts to it


def _ids(tokens: Sequence[int]) -> Array:
    """Those that a vocabulary may have."""
    return np.array([token for token in tokens if token < MOST_TOKENS], dtype=np.int64)


class Masks:
    """One request's biases and masks, as arrays made once."""

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        bias = {token: value for token, value in (sampling.logit_bias or {}).items() if token < MOST_TOKENS}
        self._biased, self._bias = _ids(list(bias)), np.array(list(bias.values()), dtype=np.float32)
        self._allowed = None if sampling.allowed_token_ids is None else _ids(sampling.allowed_token_ids)
        self._stops = _ids(request.stop_token_ids)
        self._min_tokens = sampling.min_tokens if len(self._stops) else 0
        self._bad_words = [(list(word[:-1]), word[-1]) for word in request.bad_words if word]
        self._always = bool(bias) or self._allowed is not None or bool(self._bad_words)

    @property
    def ever(self) -> bool:
        """Whether there is a position at which they are active."""
        return self._always or self._min_tokens > 0

    @property
    def bias(self) -> tuple[Array, Array]:
        """Tokens and what is added to their logits."""
        return self._biased, self._bias

    @property
    def forbid(self) -> bool:
        """Whether any token is ever ruled out."""
        return self._allowed is not None or bool(self._bad_words) or self._min_tokens > 0

    @property
    def late(self) -> bool:
        """Whether what is ruled out depends on the token before."""
        return any(start for start, _ in self._bad_words)

    def stage(self, num_generated: int) -> int:
        """Words of the same stage are the same, unless they are late."""
        return int(num_generated < self._min_tokens)

    def words(self, tokens: list[int], num_prompt: int, num_generated: int, size: int) -> Array:
        """Which tokens are not ruled out, as bits; `tokens` is all the text where it matters."""
        words = every_token(size) if self._allowed is None else no_token(size)
        if self._allowed is not None:
            add(words, self._allowed)
        remove(words, self._bad_ends(tokens, num_prompt) if self.late else _ids([end for _, end in self._bad_words]))
        if num_generated < self._min_tokens:
            remove(words, self._stops)
        return words

    def active(self, num_generated: int) -> bool:
        return self._always or num_generated < self._min_tokens

    def apply(self, logits: Array, tokens: list[int], num_prompt: int) -> None:
        """Change one row in place; `tokens` is all the text so far."""
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
        """The last token of each bad word whose other tokens were just generated."""
        ends = []
        for start, end in self._bad_words:
            begin = len(tokens) - len(start)
            if begin >= num_prompt and tokens[begin:] == start:
                ends.append(end)
        return _ids(ends)


def _forbid(logits: Array, ids: Array) -> None:
    logits[ids[ids < len(logits)]] = NEVER
